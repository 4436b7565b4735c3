"""``slipstream bench offload``: the published reload measurement on this device.

For each shape and row, arms take turns on one model: layers recomputed from inputs that stay on the device; the same
inputs offloaded and reloaded with one buffer (the published baseline), with two, and with what ``auto`` takes. c (one
reload) and g (one layer's backward) are measured alone; from them follow T_single = L · (c + g), T_double = c + (L − 1)
· max(c, g) + g, and the saving (L − 1) · min(c, g) that stands beside the measured one. The last layer's input never
leaves the device, so that L − 1 reloads happen. All arms are first shown to give the same gradients.

``longest`` and ``document`` ask what offloading is for: which packed row, and how long a single document, fits a card
of a given size with it, and which without.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from slipstream.bench import offload_longest
from slipstream.bench.document import document
from slipstream.bench.harness import WHOLE, Times, clock_for, measure
from slipstream.bench.known_shapes import OFFLOAD_ROUNDS, OFFLOAD_SHAPES
from slipstream.bench.no_memory import out_of_memory
from slipstream.bench.offload_arms import (
    AUTO,
    BACKWARD,
    DOUBLE,
    RECOMPUTE,
    SINGLE,
    Bench,
    Mode,
    Row,
    Step,
    offload_of,
    steps,
)
from slipstream.bench.offload_parts import copy_seconds, layer_backward_seconds
from slipstream.bench.offload_trace import traced
from slipstream.bench.progress import Progress
from slipstream.bench.shapes import long_documents, shape_config
from slipstream.bench.statistics import Verdict, saving
from slipstream.cost.offload import (
    double_buffer_seconds,
    layer_input_bytes,
    reload_saved_seconds,
    single_buffer_seconds,
)
from slipstream.errors import InputError

Part = Literal["reload", "longest", "document", "all"]
Say = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]
ARMS = (RECOMPUTE, SINGLE, DOUBLE, AUTO)
LONGEST_DOCUMENT = 8192
DEFAULT_LAYERS = 8
"""Layers of the default cases on a card: enough to see the schedule, few enough for a minute a case."""
CASES = (("qwen3-8b", 49_152), ("qwen3-14b", 49_152), ("qwen3-32b", 24_576), ("qwen3-8b", 8_192))
"""Rows where one bf16 layer input has the published buffer's size, and one where the host is the limit."""
TOKENS: Mapping[str, int] = {**dict(reversed(CASES)), "tiny": 256}
ROUNDING: Mapping[torch.dtype, float] = {torch.float32: 0.0, torch.bfloat16: 5e-3}
"""Relative distance of gradients that sums in another order may make."""
NOT_MEASURED = (
    "nothing was measured: without a card no input leaves the device and copies overlap with nothing; the arms differ "
    "by noise, and were shown to compute the same gradients"
)
PUBLISHED: Mapping[str, Any] = {
    "source": "an engineering post of May 2026 by Unsloth with NVIDIA; B200, second buffer against one",
    "link_bytes_per_second": 55.7e9,
    "models": [
        {
            "model": "8B dense",
            "steps_per_second": [0.3739, 0.4053],
            "gain": 0.0840,
            "extra_bytes": 0.37e9,
            "saved_seconds": 0.207,
        },
        {
            "model": "14B dense",
            "steps_per_second": [0.2245, 0.2395],
            "gain": 0.0670,
            "extra_bytes": 0.47e9,
            "saved_seconds": 0.279,
        },
        {
            "model": "32B dense",
            "steps_per_second": [0.1979, 0.2070],
            "gain": 0.0461,
            "extra_bytes": 0.23e9,
            "saved_seconds": 0.222,
        },
    ],
}


def _nowhere(result: dict[str, Any]) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class OffloadBench:
    """What to measure; None takes what suits the device."""

    shapes: tuple[str, ...] | None = None
    """Names from ``shapes.SHAPES``; on a card the three published sizes, else ``tiny``."""
    tokens: tuple[int, ...] | None = None
    """Tokens of the rows; by default each shape's published row."""
    part: Part = "reload"
    """``reload``: the arms; ``longest``: packed rows that fit; ``document``: the longest that fits; ``all``."""
    rounds: int | None = None
    """Timed rounds; 6 on a card, else 4."""
    warmup: int = 1
    """Untimed rounds before them; the proof that arms agree has filled the pool and learned the memory by then."""
    layers: int | None = None
    """Fewer layers than the shapes have; on a card 8 for ``reload``, else all."""
    host_limit: float | None = None
    """GiB of host memory for offloaded inputs; 80% of what is free without it."""
    mode: Mode | None = None
    """How layers run: eager by default for ``reload``, compiled on a card for rows that must fit."""
    cap: float = 80.0
    """GB of device memory that ``longest`` and ``document`` may use."""
    arms: tuple[str, ...] = (DOUBLE, RECOMPUTE)
    """Those of ``longest`` and ``document``."""

    def __post_init__(self) -> None:
        """Refuse what can't be measured before any model is made."""
        for shape in self.shapes or ():
            shape_config(shape, self.layers)
        for tokens in self.tokens or ():
            long_documents(tokens, LONGEST_DOCUMENT, 100)
        if self.rounds is not None and self.rounds < 2:
            raise InputError(f"rounds {self.rounds} < 2: an interval needs at least two rounds; raise --rounds")
        for arm in self.arms:
            if arm not in (DOUBLE, RECOMPUTE):
                raise InputError(f"--arms {arm!r} is none of {DOUBLE}, {RECOMPUTE}")
        for name, value in (("--cap", self.cap), ("--host-limit", self.host_limit)):
            if value is not None and value <= 0:
                raise InputError(f"{name} {value} <= 0: give a number above 0")


def run(options: OffloadBench, say: Say, save: Save = _nowhere) -> dict[str, Any]:
    """Measure, and give the result document; ``say`` is told of progress, ``save`` gets the document after each case.

    Raises ``GradientsDifferError`` when an arm does not compute what recompute does.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    rows: list[dict[str, Any]] = []
    asked = [f"{shape}, {tokens:,} tokens" for shape, tokens in _reloads(options, device)]
    wanted = _longest(options, device)
    asked += [] if wanted is None else wanted.names()
    result = document("offload", device, rows, asked=asked, published=PUBLISHED, rounds=_rounds(options, device))
    progress = Progress(say, len(asked), device)
    for row in _rows(options, device, wanted, progress):
        rows.append(row)
        save(result)
    return result


def _rows(
    options: OffloadBench, device: torch.device, wanted: offload_longest.Longest | None, progress: Progress
) -> Iterator[dict[str, Any]]:
    for shape, tokens in _reloads(options, device):
        layers = _layers(options, shape, device)
        progress.case(f"{shape}, {layers} layers, {tokens:,} tokens")
        yield measure_case(shape, layers, tokens, options, device, progress)
    if wanted is not None:
        yield from offload_longest.rows(shape_config(wanted.shape, options.layers), wanted, device, progress)


def _reloads(options: OffloadBench, device: torch.device) -> list[tuple[str, int]]:
    return cases(options, device) if options.part in ("reload", "all") else []


def _longest(options: OffloadBench, device: torch.device) -> offload_longest.Longest | None:
    """The rows that must fit, where they are asked for."""
    if options.part not in ("longest", "document", "all"):
        return None
    card = device.type == "cuda"
    return offload_longest.Longest(
        shape=(options.shapes or OFFLOAD_SHAPES.on(card))[0],
        mode=options.mode or ("compiled" if card else "eager"),
        packed=() if options.part == "document" else options.tokens or offload_longest.packed_rows(device),
        document=options.part != "longest",
        arms=options.arms,
        cap_bytes=int(options.cap * 1e9),
        host_limit=options.host_limit,
    )


def cases(options: OffloadBench, device: torch.device) -> list[tuple[str, int]]:
    """Shapes and rows."""
    if options.shapes is None and options.tokens is None:
        return list(CASES) if device.type == "cuda" else [("tiny", TOKENS["tiny"])]
    shapes = options.shapes or OFFLOAD_SHAPES.on(device.type == "cuda")
    return [(shape, tokens) for shape in shapes for tokens in options.tokens or (TOKENS.get(shape, CASES[0][1]),)]


def _layers(options: OffloadBench, shape: str, device: torch.device) -> int:
    whole = int(shape_config(shape).num_hidden_layers)
    return options.layers or (min(whole, DEFAULT_LAYERS) if device.type == "cuda" else whole)


def _rounds(options: OffloadBench, device: torch.device) -> int:
    return options.rounds or OFFLOAD_ROUNDS.on(device.type == "cuda")


def measure_case(
    shape: str,
    layers: int,
    tokens: int,
    options: OffloadBench,
    device: torch.device,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """One row of the results; what can't run here is a row with the reason."""
    config = shape_config(shape, layers)
    documents = long_documents(tokens, LONGEST_DOCUMENT, min(40_000, config.vocab_size))
    mode = options.mode or "eager"
    row = {"shape": shape, "layers": layers, "tokens": tokens, "documents": len(documents), "mode": mode}
    bench = Bench.of(config, device, mode)
    try:
        return {**row, **_measured(bench, Row.of(documents, tokens, device), options, progress)}
    except InputError as error:
        return {**row, "refused": str(error)}
    except torch.OutOfMemoryError as error:
        return {**row, "refused": out_of_memory(error)}
    finally:
        bench.close()


def _measured(bench: Bench, batch: Row, options: OffloadBench, progress: Progress | None) -> dict[str, Any]:
    device, tokens = bench.device, batch.labels.numel()
    nbytes = layer_input_bytes(bench.base.config, tokens, bench.base.dtype.itemsize)
    copies = copy_seconds(nbytes, device)
    c, g = copies["back"], layer_backward_seconds(bench, batch)
    row: dict[str, Any] = {
        "dtype": str(bench.dtype).removeprefix("torch."),
        "input_bytes": nbytes,
        "copy_seconds": copies,
        "link_bytes_per_second": {name: nbytes / seconds for name, seconds in copies.items()},
        "c": c,
        "g": g,
        "predicted": _predicted(bench.layers, c, g) if device.type == "cuda" else None,
    }
    if device.type != "cuda":
        row["not_measured"] = NOT_MEASURED
    with steps(bench, batch, ARMS, options.host_limit) as arms:
        row["gradients"] = prove_equal(arms)
        times = measure(
            {name: step.arm() for name, step in arms.items()},
            _rounds(options, device),
            options.warmup,
            clock_for(device),
            progress,
        )
        row["arms"] = {name: _arm_row(step, times[name], nbytes, copies) for name, step in arms.items()}
    row["comparisons"] = comparisons(times, row["predicted"] and row["predicted"]["saved"])
    row["notes"] = [str(note) for note in bench.notes]
    return row


def _predicted(layers: int, c: float, g: float) -> dict[str, float]:
    """Seconds of the backward through all layers by the two schedules, and their difference."""
    return {
        "T_single": single_buffer_seconds(layers, c, g),
        "T_double": double_buffer_seconds(layers, c, g),
        "saved": reload_saved_seconds(layers, c, g),
    }


class GradientsDifferError(RuntimeError):
    """An arm does not compute what recompute without offload does."""


def prove_equal(arms: Mapping[str, Step]) -> dict[str, Any]:
    """Each arm's gradient beside recompute's: 0 for the same bits.

    Attention kernels that add in no fixed order differ from run to run; an arm may then differ by ``ROUNDING``, or by
    what recompute differs from itself. An input that came back wrong differs by far more.
    """
    first, again = arms[RECOMPUTE].gradient(), arms[RECOMPUTE].gradient()
    noise = _distance(again, first)
    found: dict[str, Any] = {"recompute_again": noise}
    for name, step in arms.items():
        if name != RECOMPUTE:
            found[name] = _distance(step.gradient(), first)
            limit = max(3 * noise, ROUNDING[step.bench.dtype])
            if not found[name] <= limit:  # a NaN differs too
                raise GradientsDifferError(
                    f"{name}: relative distance {found[name]:.1e} from recompute, limit {limit:.1e}"
                )
    return found


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return 0.0 if torch.equal(one, other) else float((one - other).norm() / other.norm())


def _arm_row(step: Step, times: Mapping[str, list[float]], nbytes: int, copies: Mapping[str, float]) -> dict[str, Any]:
    """What one arm took: seconds by part, memory, and for those that offload its copies."""
    seconds = {part: [round(value, 6) for value in values] for part, values in times.items()}
    row: dict[str, Any] = {"seconds": seconds, "peak_bytes": step.peaks[-1] if step.peaks else None}
    if offload_of(step) is not None:
        row["copies"] = _copies_row(step, _median(times[WHOLE]), nbytes, copies)
    return row


def _copies_row(step: Step, seconds: float, nbytes: int, copies: Mapping[str, float]) -> dict[str, Any]:
    """Bytes in one step, the share of the link they take over the whole step, and how much of their time is hidden."""
    offload = offload_of(step)
    assert offload is not None
    (lane,) = offload.lanes.values()
    before = (lane.sent, lane.reloads)
    shares = traced(step, nbytes)
    sent, reloads = lane.sent - before[0], lane.reloads - before[1]
    return {
        "buffers": lane.depth,
        "out_bytes": sent * nbytes,
        "back_bytes": reloads * nbytes,
        "link_share": {"out": sent * copies["out"] / seconds, "back": reloads * copies["back"] / seconds},
        "traced": shares,
    }


def comparisons(times: Times, predicted: float | None) -> list[dict[str, Any]]:
    """The second buffer against one, which the formula predicts; and each arm's step against recompute's.

    ``predicted``: seconds that the second buffer saves; None where there is nothing to predict.
    """
    found = [
        _compare(times, SINGLE, DOUBLE, BACKWARD, predicted),
        _compare(times, SINGLE, DOUBLE, WHOLE, predicted),
        _compare(times, SINGLE, AUTO, BACKWARD, predicted),
    ]
    return found + [_compare(times, RECOMPUTE, name, WHOLE, None) for name in ARMS if name != RECOMPUTE]


def _compare(times: Times, other: str, ours: str, part: str, predicted: float | None) -> dict[str, Any]:
    found = saving(times[other][part], times[ours][part])
    verdict = None if predicted is None else Verdict(predicted, found.saved)
    ratio = found.times_as_long
    return {
        "arm": ours,
        "against": other,
        "part": part,
        "seconds": found.ours_seconds,
        "against_seconds": found.seconds,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "saved_seconds": found.saved.median,
        "saved_low": found.saved.low,
        "saved_high": found.saved.high,
        "predicted_seconds": predicted,
        "holds": None if verdict is None else verdict.holds,
    }


def _median(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def csv_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The comparisons of a result document, flat."""
    head = {name: result[name] for name in ("date", "commit", "device")}
    names = ("shape", "layers", "tokens", "documents")
    return [
        {**head, **{name: row[name] for name in names}, "c": row["c"], "g": row["g"], **comparison}
        for row in result["rows"]
        for comparison in row.get("comparisons", ())
    ]
