"""``slipstream bench packing``: the published packing measurement on this device.

For each shape, row, attention choice and kind of activations, arms take turns on one model: stock transformers with
position ids; boundaries and mask rebuilt in every layer (two references, ``wasteful.py``); Slipstream. In the same
rounds stand-alone arms time L calls of one decoder layer, with the structure kept and rebuilt each time: the
difference, what a rebuild adds to a layer with the waits it forces, is the formula's s. From it follows the prediction,
(L − 1) · s and with recompute (2L − 1) · s, where the L rebuilds of the recompute have an s of their own; beside it
stands what was saved in forward, backward and whole step. (The builds by themselves are timed too; back to back they
cost less than in a layer, where a wait also lets the device run dry until the host has launched what follows, so that
they predict too little.) All arms are first proven to compute the same.

A case that can't run here (an attention choice refused, dense masks that don't fit) is a row with the reason.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch

from slipstream.bench.document import document
from slipstream.bench.harness import WHOLE, Arm, Times, clock_for, measure
from slipstream.bench.known_shapes import PACKING_ROUNDS, PACKING_SHAPES
from slipstream.bench.no_memory import out_of_memory
from slipstream.bench.packing_arms import (
    BACKWARD,
    FORWARD,
    LAYER,
    LAYER_BACKWARD,
    OURS,
    STOCK,
    LayerCalls,
    PackedStep,
    Workbench,
    packed_steps,
    prove_equal,
)
from slipstream.bench.packing_fit import default_tokens, refuse_what_does_not_fit
from slipstream.bench.progress import Progress
from slipstream.bench.shapes import random_documents, shape_config
from slipstream.bench.statistics import Verdict, paired_differences, saving
from slipstream.bench.wasteful import Kind, PackedRow, choices, kinds, rebuild
from slipstream.cost.estimate import packing_saved_forward
from slipstream.device.segments import Segments
from slipstream.errors import InputError
from slipstream.model.quantize import check_quantize
from slipstream.transform import Options, apply, restore

Part = Literal["layer", "all"]
Say = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]
PUBLISHED: Mapping[str, Any] = {
    "source": "an engineering post of May 2026 by Unsloth with NVIDIA; Blackwell, 2,048 tokens in all",
    "metadata_seconds": 0.0002,
    "mask_seconds": 0.0137,
    "models": [
        {
            "model": "Llama-3.2-1B",
            "layers": 16,
            "predicted_seconds": 0.206,
            "saved_seconds": 0.199,
            "share_of_step": 0.115,
        },
        {
            "model": "Qwen3-0.6B",
            "layers": 28,
            "predicted_seconds": 0.370,
            "saved_seconds": 0.319,
            "share_of_step": 0.148,
        },
        {"model": "Qwen3-14B QLoRA", "gain": {FORWARD: 0.433, BACKWARD: 0.058, WHOLE: 0.143}},
    ],
}


def _nowhere(result: dict[str, Any]) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class PackingBench:
    """What to measure; None takes what suits the device."""

    shapes: tuple[str, ...] | None = None
    """Names from ``shapes.SHAPES``; on a card the two published ones, else ``tiny``."""
    tokens: tuple[int, ...] | None = None
    """Tokens of the rows; on a card 2,048 and the largest row whose dense masks fit."""
    attention: tuple[str, ...] | None = None
    """Attention choices; all of them by default."""
    recompute: tuple[bool, ...] = (False, True)
    """Whether layers are recomputed in the backward."""
    part: Part = "all"
    """``layer``: builds and one decoder layer; ``all``: training steps as well."""
    rounds: int | None = None
    """Timed rounds; 20 on a card, else 5."""
    warmup: int = 2
    """Untimed rounds before them; the proof that arms agree has run each of them twice by then."""
    layers: int | None = None
    """Fewer layers than the shapes have."""
    nf4: bool = False
    """The decoder's linear layers in four bits; needs a card and bitsandbytes."""

    def __post_init__(self) -> None:
        """Refuse what can't be measured before any model is made."""
        for shape in self.shapes or ():
            shape_config(shape, self.layers)
        for tokens in self.tokens or ():
            random_documents(tokens, 100)
        for choice in self.attention or ():
            if choice not in choices():
                raise InputError(f"attention {choice!r} is unknown; there is {', '.join(choices())}")
        if self.rounds is not None and self.rounds < 2:
            raise InputError(f"rounds {self.rounds} < 2: an interval needs at least two rounds; raise --rounds")
        if self.nf4:
            check_quantize("nf4", has_card=torch.cuda.is_available())


@dataclass(frozen=True)
class Case:
    """One model, row, attention choice and kind of activations."""

    bench: Workbench
    shape: str
    tokens: int
    choice: str
    recompute: bool
    documents: list[dict[str, list[int]]]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The references of this attention choice."""
        return kinds(self.choice)

    def __str__(self) -> str:
        """For the progress line."""
        return f"{self.shape}, {self.tokens:,} tokens, {self.choice}, {'recompute' if self.recompute else 'keep'}"

    def name(self) -> dict[str, Any]:
        """What tells this case from others, for its row."""
        lengths = [len(one["input_ids"]) for one in self.documents]
        return {
            "shape": self.shape,
            "layers": self.bench.layers,
            "tokens": self.tokens,
            "documents": len(lengths),
            "longest": max(lengths),
            "attention": self.choice,
            "recompute": self.recompute,
        }


def run(options: PackingBench, say: Say, save: Save = _nowhere) -> dict[str, Any]:
    """Measure, and give the result document; ``say`` is told of progress, ``save`` gets the document after each case.

    Raises ``ResultsDifferError`` when two arms don't compute the same.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = options.shapes or PACKING_SHAPES.on(device.type == "cuda")
    rows: list[dict[str, Any]] = []
    asked, progress = list(shapes), None
    result = document("packing", device, rows, asked=asked, published=PUBLISHED, rounds=_rounds(options, device))
    for shape in shapes:
        bench = Workbench.of(shape_config(shape, options.layers), device, nf4=options.nf4)
        cases = list(_cases(options, bench, shape))
        at = asked.index(shape)
        asked[at : at + 1] = map(str, cases)
        progress = progress or Progress(say, len(cases) * len(shapes), device)
        for case in cases:
            progress.case(str(case))
            rows.append(measure_case(case, options, progress))
            save(result)
        del bench, cases, case  # the next shape's model needs the room
    return result


def _cases(options: PackingBench, bench: Workbench, shape: str) -> Iterator[Case]:
    rows = options.tokens or default_tokens(bench)
    for tokens, choice, recompute in product(rows, options.attention or choices(), options.recompute):
        documents = random_documents(tokens, min(40_000, bench.base.config.vocab_size))
        yield Case(bench, shape, tokens, choice, recompute, documents)


def _rounds(options: PackingBench, device: torch.device) -> int:
    return options.rounds or PACKING_ROUNDS.on(device.type == "cuda")


def measure_case(case: Case, options: PackingBench, progress: Progress | None = None) -> dict[str, Any]:
    """One row of the results."""
    try:
        refuse_what_does_not_fit(case.bench, case.tokens, case.choice, case.recompute)
        case.bench.begin_again()
        case.bench.set_recompute(case.recompute)
        apply(case.bench.model, Options(attention=case.choice, norms="model"))  # type: ignore[arg-type]
        return _measured(case, options, progress)
    except InputError as error:
        return {**case.name(), "refused": str(error)}
    except torch.OutOfMemoryError as error:
        return {**case.name(), "refused": out_of_memory(error)}
    finally:
        case.bench.optimizer.zero_grad(set_to_none=True)
        restore(case.bench.model)
        torch.compiler.reset()  # a process compiles one function for few shapes only, then runs it uncompiled


def _measured(case: Case, options: PackingBench, progress: Progress | None) -> dict[str, Any]:
    rounds = _rounds(options, case.bench.device)
    clock = clock_for(case.bench.device)
    held = "nf4" if options.nf4 else str(case.bench.dtype).removeprefix("torch.")
    row: dict[str, Any] = {**case.name(), "dtype": held}
    steps = packed_steps(case.bench, case.documents, case.tokens, case.choice, case.kinds)
    row["arms"] = prove_equal(steps)
    arms = {**build_arms(case), **layer_arms(steps, case.recompute)}
    if options.part == "all":
        arms |= {name: step.arm() for name, step in steps.items()}
    times = measure(arms, rounds, options.warmup, clock, progress)
    _drop_batches(steps.values())
    row["builds"], row["layer"] = _build_costs(case, times), _layer_costs(case, times)
    row["rebuild_adds"] = _added_by_rebuilding(case, times, LAYER)
    if case.recompute:
        row["rebuild_adds_to_recompute"] = _added_by_rebuilding(case, times, LAYER_BACKWARD)
    if options.part == "all":
        again = row.get("rebuild_adds_to_recompute", dict.fromkeys(case.kinds, 0.0))
        row["comparisons"] = _comparisons(case, times, row["rebuild_adds"], again)
        for name in steps:
            row["arms"][name]["seconds"] = {part: _rounded(values) for part, values in times[name].items()}
    return row


def _drop_batches(steps: Iterable[PackedStep]) -> None:
    """Forget batches and graphs, so that the next case finds the memory."""
    for step in steps:
        step.inputs, step.loss = {}, None


# What stands alone: builds, and one layer's attention


def build_arms(case: Case) -> dict[str, Arm]:
    """Boundaries alone, and all that a layer rebuilds, L times back to back as a forward does."""
    position_ids = _position_ids(case)
    dtype, layers = case.bench.dtype, case.bench.layers

    def repeated(build: Callable[[PackedRow], object]) -> Arm:
        def chain() -> None:
            row = PackedRow(position_ids)
            for _ in range(layers):
                build(row)

        return Arm({"builds": chain})

    arms = {"metadata": repeated(lambda row: row.boundaries("vectorised"))}
    for kind in case.kinds:
        arms[f"rebuild-{kind}"] = repeated(partial(rebuild, choice=case.choice, kind=kind, dtype=dtype))
    return arms


def layer_arms(steps: Mapping[str, PackedStep], recompute: bool) -> dict[str, Arm]:
    """One decoder layer L times over, as each arm calls it: with its structure kept, and rebuilt each time."""
    return {f"layer-{name}": LayerCalls(step, recompute).arm() for name, step in steps.items() if name != STOCK}


def _position_ids(case: Case) -> torch.Tensor:
    lengths = [len(one["input_ids"]) for one in case.documents]
    return Segments.from_lengths(lengths).position_ids().to(case.bench.device)


def _build_costs(case: Case, times: Times) -> dict[str, float]:
    """Median seconds of one metadata call (s), and of one whole rebuild (m) by reference."""
    names = ("metadata", *(f"rebuild-{kind}" for kind in case.kinds))
    return {name: _median(times[name][WHOLE]) / case.bench.layers for name in names}


def _layer_costs(case: Case, times: Times) -> dict[str, float]:
    """Median seconds of one layer's forward, by arm."""
    return {
        name.removeprefix("layer-"): _median(values[LAYER]) / case.bench.layers
        for name, values in times.items()
        if name.startswith("layer-")
    }


def _added_by_rebuilding(case: Case, times: Times, part: str) -> dict[str, float]:
    """Median seconds that rebuilding adds to one layer's forward or backward, by reference: the formula's s."""
    kept = times[f"layer-{OURS}"][part]
    return {
        kind: _median(paired_differences(times[f"layer-wasteful-{kind}"][part], kept)) / case.bench.layers
        for kind in case.kinds
    }


# Prediction and measurement


def _comparisons(
    case: Case, times: Times, adds: Mapping[str, float], again: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Each other arm against ours, in forward, backward and the whole step.

    ``adds``, ``again``: seconds that a rebuild adds to a layer's forward, and to its recompute, by reference.
    """
    found = []
    for kind in case.kinds:
        for part in (FORWARD, BACKWARD, WHOLE):
            predicted = predicted_saving(part, case.bench.layers, adds[kind], again[kind])
            found.append(compare(times, f"wasteful-{kind}", part, predicted))
    return found + [compare(times, STOCK, part, None) for part in (FORWARD, BACKWARD, WHOLE)]


def predicted_saving(part: str, layers: int, build_seconds: float, again_seconds: float = 0.0) -> float:
    """Seconds that building once saves in a part of the step: (L − 1) · s forward, L · s' where layers are recomputed.

    Where a rebuild costs the recompute what it costs the forward, the whole is the published (2L − 1) · s.
    ``again_seconds``: s', 0 without recompute.
    """
    forward = packing_saved_forward(layers, build_seconds)
    backward = layers * again_seconds
    return {FORWARD: forward, BACKWARD: backward, WHOLE: forward + backward}[part]


def compare(times: Times, other: str, part: str, predicted: float | None) -> dict[str, Any]:
    """Seconds saved by ours against ``other``, beside what was predicted (None: nothing was).

    ``gain`` is how much more work a second does, ``share`` how much of the other's time is saved.
    """
    found = saving(times[other][part], times[OURS][part])
    verdict = None if predicted is None else Verdict(predicted, found.saved)
    return {
        "against": other,
        "part": part,
        "seconds": found.seconds,
        "ours_seconds": found.ours_seconds,
        "saved_seconds": found.saved.median,
        "saved_low": found.saved.low,
        "saved_high": found.saved.high,
        "gain": found.gain.median,
        "share": found.share.median,
        "predicted_seconds": predicted,
        "ratio": verdict and verdict.ratio,
        "holds": verdict and (verdict.holds if predicted else None),
    }


def csv_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The comparisons of a result document, flat."""
    names = ("shape", "layers", "tokens", "documents", "attention", "recompute")
    head = {name: result[name] for name in ("date", "commit", "device")}
    return [
        {**head, **{name: row[name] for name in names}, **comparison}
        for row in result["rows"]
        for comparison in row.get("comparisons", ())
    ]


def _median(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 6) for value in values]
