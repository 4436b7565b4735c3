"""A plan for people: what fits and what not first, then memory, time, gains and decisions, in 80 columns."""

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slipstream.data.account import counted
from slipstream.plan.prediction import Gain, Prediction
from slipstream.plan.search import Remedy
from slipstream.report.numbers import bytes_text, percent_text, time_text

PARTS = {
    "matmul": "matrix products as they run",
    "adapters": "adapters' products",
    "attention": "attention",
    "elementwise": "norms, activations, sums",
    "loss": "loss over the vocabulary",
    "unpack": "NF4 unpacking",
    "optimizer": "optimizer",
    "kernels": "least time of each kernel",
    "exposed": "copies nothing hides",
}
"""Parts of the device's time, in words."""


def show(plan: dict[str, Any], prediction: Prediction, found: list[Gain], ways: list[Remedy], console: Console) -> None:
    """Print a plan."""
    console.print(verdict(prediction, plan["device"]["name"]))
    console.print(f"  {packing_line(prediction)}")
    for line in time_lines(prediction, plan["ceilings"]["source"]):
        console.print(f"  {line}")
    console.print(_memory_table(prediction))
    console.print(_time_table(prediction))
    if found:
        console.print(_gain_table(found, prediction))
    for decision in prediction.decisions:
        console.print(f"  {decision}")
    for line in remedy_lines(prediction, ways):
        console.print(line)


def verdict(prediction: Prediction, device: str) -> str:
    """Whether it fits, in a sentence."""
    needed, room = prediction.memory.device_bytes, prediction.room
    word = "fits" if prediction.fits else "does not fit"
    text = f"{word}: a step takes {bytes_text(needed)} of the {bytes_text(max(0.0, room))} usable on {device}"
    host, limit = prediction.memory.host_bytes, prediction.host_room
    if host and limit is not None:
        text += f", and {bytes_text(host)} of the {bytes_text(limit)} of host memory that it may take"
    return text


def packing_line(prediction: Prediction) -> str:
    """Fill, and what padding would compute."""
    packing = prediction.packing
    if not packing.enabled:
        return f"not packed: {1 - packing.fill:.1%} of the tokens computed are padding"
    return (
        f"packed into {counted(packing.rows, 'row')} of {packing.capacity:,} tokens, {percent_text(packing.fill)} "
        f"full; padding would compute {packing.padded_ratio:.2f} times as many tokens"
    )


def time_lines(prediction: Prediction, source: str) -> Iterator[str]:
    """The step, the floor below it, and the whole run."""
    times = prediction.times
    limit = "the device's work" if times.device >= times.host else "the host, which launches kernels"
    yield (
        f"a step takes about {seconds_text(times.total)} ({speed_text(prediction.tokens_per_second)}); it waits for "
        f"{limit}"
    )
    yield (
        f"no step takes less than {seconds_text(times.floor)}, {percent_text(times.floor / times.total)} of that: "
        f"its matrix products, all at the {source} rate of a large one"
    )
    takes = "takes" if prediction.steps == 1 else "take"
    evaluated = "" if prediction.evaluations == 0 else f" with {counted(prediction.evaluations, 'evaluation')}"
    yield (
        f"{counted(prediction.steps, 'step')} {takes} about {seconds_text(prediction.seconds)}{evaluated}, loading not "
        "counted"
    )


def remedy_lines(prediction: Prediction, ways: list[Remedy]) -> Iterator[str]:
    """How to make it fit, as flags."""
    if prediction.fits:
        return
    if not ways:
        yield "no three changes of this recipe make it fit: take a smaller model, or a larger device"
        return
    order = " by any one of these (what learns the same first, then by the time a token takes)"
    yield f"to make it fit{order if len(ways) > 1 else ''}:"
    for way in ways:
        flags = " ".join(f"--set {change}" for change in way.changes)
        took = f"{bytes_text(way.prediction.memory.device_bytes)}, {time_text(way.prediction.seconds)} in all"
        yield f"  {flags}   ({'; '.join([took, *way.costs])})"


def seconds_text(seconds: float) -> str:
    """E.g. ``52.6 ms``, ``1.5 s``."""
    sign = "-" if seconds < 0 else ""
    return sign + (f"{abs(seconds) * 1e3:.3g} ms" if abs(seconds) < 0.9995 else time_text(abs(seconds)))


def speed_text(tokens_per_second: float) -> str:
    """E.g. ``24,874 tokens/s``, ``0.35 tokens/s``."""
    digits = ",.0f" if tokens_per_second >= 10 else ".2g"
    return f"{tokens_per_second:{digits}} tokens/s"


def _memory_table(prediction: Prediction) -> Table:
    table = _table("memory at the peak of a step", "part", "size", "")
    for part in prediction.memory.device:
        table.add_row(part.name, bytes_text(part.bytes), part.what)
    table.add_row("together", bytes_text(prediction.memory.device_bytes), "")
    for part in prediction.memory.host:
        table.add_row(f"host: {part.name}", bytes_text(part.bytes), part.what)
    return table


def _time_table(prediction: Prediction) -> Table:
    table = _table("time of a step", "part", "time", "of device")
    times = prediction.times
    for name, words in PARTS.items():
        seconds = getattr(times, name)
        if seconds:
            table.add_row(words, seconds_text(seconds), f"{seconds / times.device:.0%}")
    table.add_row("device together", seconds_text(times.device), "")
    if times.host:
        table.add_row("host meanwhile", seconds_text(times.host), "")
    if times.waits:
        table.add_row("host's waits, on top", seconds_text(times.waits), "")
    table.add_row("the step", seconds_text(times.total), "")
    return table


def _gain_table(found: list[Gain], prediction: Prediction) -> Table:
    table = _table("what each optimisation saves a step", "optimisation", "state", "time", "memory")
    for gain in found:
        share = gain.seconds / prediction.times.total
        time = f"{seconds_text(gain.seconds)} ({share_text(share)})" if gain.seconds else ""
        memory = f"{'-' if gain.bytes < 0 else ''}{bytes_text(abs(gain.bytes))}" if gain.bytes else ""
        table.add_row(gain.name, "on" if gain.on else "off", time, memory)
    return table


def share_text(share: float) -> str:
    """E.g. ``+12%``, ``-3%``, ``0%``."""
    return f"{share:+.0%}" if abs(share) >= 0.005 else "0%"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(
            column, justify="right" if column in ("size", "time", "of device", "memory") and index else "left"
        )
    return table
