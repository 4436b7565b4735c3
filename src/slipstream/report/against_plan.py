"""What was predicted beside what came out, and one step's timeline: the page's sections on where time and memory went.

Each prediction stands beside its measurement with their ratio, so that a reader sees how far the plan can be trusted
before he reads anything else off it. Whatever the records lack is left out.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from slipstream.report.markup import Markup, join, tag
from slipstream.report.numbers import KeyNumbers, amount_text, bytes_text, number, percent_text, section, time_text
from slipstream.report.plots import EMPTY, FIRST, GRID, INK, MUTED, SECOND, Plot, style
from slipstream.train.records import Records
from slipstream.train.timeline import FILE

LANES = {"compute": FIRST, "copies": SECOND, "operators": FIRST, "launches": MUTED, "waits": INK}
"""Lanes of the timeline from top to bottom, by colour."""
MS = 1e3


def median_step(records: Records) -> float | None:
    """Seconds of the median step, the first left out: it compiles and allocates."""
    seconds = [step.seconds for step in records.steps[1:] or records.steps if step.seconds > 0]
    return statistics.median(seconds) if seconds else None


def floor_share(records: Records) -> float | None:
    """The time that the matrix products alone would take, over the median step."""
    floor, step = number(section(records.run, "plan").get("floor_seconds")), median_step(records)
    return floor / step if floor is not None and step else None


def comparison(records: Records, numbers: KeyNumbers) -> Markup:
    """A table of predictions and measurements; nothing where the run carries no plan."""
    plan = section(records.run, "plan")
    if "missing" in plan:
        return tag("p", f"No prediction was made: {plan['missing']}")
    whole = records.run.get("outcome") == "finished" and not records.problems  # else some of it isn't in the sum
    rows = [
        _row("Device memory at the peak", number(plan.get("device_bytes")), numbers.peak_bytes, bytes_text),
        _row("A step", number(plan.get("step_seconds")), median_step(records), _step_text),
        _row("Training, with evaluations", number(plan.get("seconds")), numbers.seconds if whole else None, time_text),
        _row("Tokens a second", number(plan.get("tokens_per_second")), numbers.tokens_per_second, _count),
    ]
    shown = [row for row in rows if row]
    if not shown:
        return Markup()
    head = tag("thead", tag("tr", *(tag("th", name, scope="col", **_class(name)) for name in ("", *_COLUMNS))))
    return join(tag("table", head, tag("tbody", *shown)), _floor_line(records))


_COLUMNS = ("Predicted", "Measured", "Ratio")


def _class(name: str) -> dict[str, str]:
    return {"class_": "amount"} if name else {}


def _row(name: str, predicted: float | None, measured: float | None, text: Any) -> Markup:
    if predicted is None:
        return Markup()
    ratio = "–" if not measured or not predicted else f"{measured / predicted:.2f}"
    cells = (text(predicted), "not measured" if measured is None else text(measured), ratio)
    return tag("tr", tag("th", name, scope="row"), *(tag("td", cell, class_="amount") for cell in cells))


def _floor_line(records: Records) -> Markup:
    share = floor_share(records)
    if share is None:
        return Markup()
    floor = number(section(records.run, "plan").get("floor_seconds"))
    assert floor is not None
    words = (
        "The matrix-product limit: a step that did nothing but multiply with the model's weights, at the rate of this "
        f"device, would take {_step_text(floor)}, {percent_text(share)} of the median step. The rest is attention, the "
        "loss, the optimizer, memory traffic, and waiting for the host."
    )
    return tag("p", words)


def _step_text(seconds: float) -> str:
    return f"{seconds * MS:.{0 if seconds >= 0.01 else 2}f} ms" if seconds < 10 else time_text(seconds)


def _count(value: float) -> str:
    return f"{value:,.0f}"


def memory_by_part(records: Records, numbers: KeyNumbers) -> Plot | None:
    """The predicted parts of the peak, one bar each, and the measured peak beside their sum."""
    parts = _parts(section(records.run, "plan", "memory").get("device"))
    if not parts:
        return None
    total, peak = sum(size for _, size in parts), numbers.peak_bytes
    bars = [(name, size / 2**30, EMPTY) for name, size in sorted(parts, key=lambda part: -part[1])]
    bars.append(("together", total / 2**30, FIRST))
    if peak is not None:
        bars.append(("measured", peak / 2**30, SECOND))
    measured = "" if peak is None else f" {bytes_text(peak)} were measured."
    text = f"What the plan expected at the peak of a step, {bytes_text(total)} together.{measured}"

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        places = list(range(len(bars)))[::-1]
        axes.barh(places, [size for _, size, _ in bars], height=0.62, color=[colour for _, _, colour in bars])
        style(axes, "GiB", "", ticks=None)
        axes.set_yticks(places, [name for name, _, _ in bars])
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.grid(visible=False, axis="y")

    height = 90 + 24 * len(bars)
    return Plot("parts", "Memory by part", text, draw, wide=(480, height), narrow=(330, height))


def _parts(value: Any) -> list[tuple[str, float]]:
    items = value if isinstance(value, list) else []
    known = [(str(item.get("name")), number(item.get("bytes"))) for item in items if isinstance(item, dict)]
    return [(name, size) for name, size in known if size]


# ------------------------------------------------------------------------------------------------------- the timeline


def read_timeline(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """A run's ``timeline.json`` and what is wrong with it; empty where no step was sampled."""
    path = folder / FILE
    if not path.exists():
        return {}, []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, [f"{FILE} cannot be read ({error}); the timeline is left out"]
    return (found, []) if isinstance(found, dict) else ({}, [f"{FILE} holds no object; the timeline is left out"])


def timeline_figure(found: dict[str, Any]) -> Plot | None:
    """One step's lanes over its milliseconds; None where nothing was sampled."""
    lanes = {name: spans for name in LANES if (spans := _spans(section(found, "lanes").get(name)))}
    length = number(found.get("milliseconds"))
    if not lanes or not length:
        return None
    busy = section(found, "busy")
    shares = ", ".join(f"{name} {percent_text(number(busy.get(name)))}" for name in lanes)
    calls = number(section(found, "events").get("waits")) or 0.0
    waited = "" if "launches" not in lanes else f" The host waited for the device {amount_text(calls, 'time')}."
    text = f"Step {found.get('step', '?')} took {length:.0f} ms under the profiler; busy: {shares}.{waited}"

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for place, (name, spans) in enumerate(reversed(lanes.items())):
            axes.broken_barh(spans, (place - 0.32, 0.64), facecolors=LANES[name], linewidth=0)
        style(axes, "ms", "", ticks=None)
        axes.set_yticks(range(len(lanes)), list(reversed(lanes)))
        axes.set_xlim(0, length)
        axes.grid(visible=False, axis="y")

    height = 80 + 42 * len(lanes)
    return Plot("timeline", "One step", text, draw, wide=(480, height), narrow=(330, height))


def _spans(value: Any) -> list[tuple[float, float]]:
    pairs = value if isinstance(value, list) else []
    known = [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2 and None not in map(number, pair)]
    return [(float(start), float(span)) for start, span in known]
