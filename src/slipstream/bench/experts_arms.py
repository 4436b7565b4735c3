"""The arms of the experts benchmark: one layer, routing alone, and whole training steps.

Every arm of a part works on one model instance; switching happens in its ``prepare``, untimed. Layers run with frozen
matrices, as under adapters, and gradients go to their input and their router.

Differences are relative to the norm. A layer's arms differ by rounding alone. In a whole step of half precision that
rounding decides near-ties between experts otherwise, layer after layer (with random routers a few tokens in a hundred),
so the limit there is wide: it tells a result of something else, which is as far away as the gradient is long. That the
arms compute the same is proven on the layer.

Whole steps of ours are the trainer's own, uncompiled: its loss in chunks and its adapters in half precision, whatever
the experts. transformers' are peft's adapters under autocast and the loss of whole logits.
"""

import gc
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from slipstream.bench.experts_reference import ROUTINGS, HostQueries, use_where, where_experts
from slipstream.bench.harness import WHOLE, Arm, Times, clock_for, measure
from slipstream.bench.packing_arms import BACKWARD, FORWARD, Outcome, PackedStep, ResultsDifferError, Workbench
from slipstream.bench.progress import Progress
from slipstream.bench.shapes import adapted_model, bench_dtype, random_documents, shape_config
from slipstream.bench.statistics import saving
from slipstream.device.feed import PackedCollator
from slipstream.device.segments import Segments
from slipstream.model.experts import ExpertsForward, grouped_experts, looped_experts
from slipstream.model.experts_choice import ExpertsChoice, find_experts
from slipstream.model.half_adapters import HalfAdapters
from slipstream.train.forward import BatchLoss
from slipstream.train.loss import learned_tokens
from slipstream.transform import Options, apply, restore

REFERENCE, SORTED, GROUPED = ROUTINGS
STOCK_GROUPED, STOCK_EAGER = "transformers-grouped", "transformers-eager"
LAYER_ARMS: Mapping[str, ExpertsForward] = MappingProxyType(
    {REFERENCE: where_experts, SORTED: looped_experts, GROUPED: grouped_experts}
)
LAYER_LIMIT: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 1e-4, torch.bfloat16: 0.05})
STEP_LIMIT: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 1e-3, torch.bfloat16: 1.0})
REPEATS = 10
"""Routings, or passes through a layer, in one timed part: one alone is about as long as its launches vary."""
WARMUP = 2


# One layer


@dataclass(eq=False)
class _Layer:
    """One mixture block with an input and the gradient of its output."""

    block: Any
    experts: Any
    hidden: torch.Tensor
    grad: torch.Tensor
    outputs: list[torch.Tensor]

    @classmethod
    def of(cls, shape: str, tokens: int, device: torch.device) -> "_Layer":
        config = shape_config(shape, 2)
        config.vocab_size = 64
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.device(device):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=bench_dtype(device)).requires_grad_(False)
            hidden, grad = (torch.randn(1, tokens, config.hidden_size, dtype=bench_dtype(device)) for _ in range(2))
        name, experts = next(iter(find_experts(model).items()))
        block = model.get_submodule(name.rpartition(".")[0])
        for parameter in block.parameters():
            parameter.requires_grad_(all(parameter is not own for own in experts.parameters()))
        return cls(block, experts, hidden.requires_grad_(), grad, [])

    def install(self, function: ExpertsForward) -> None:
        self.experts.forward = partial(function, self.experts)

    def forward(self) -> None:
        for _ in range(REPEATS):
            found = self.block(self.hidden)
            self.outputs.append(found[0] if isinstance(found, tuple) else found)

    def backward(self) -> None:
        for output in self.outputs:
            torch.autograd.backward(output, self.grad)
        self.outputs.clear()

    def prepare(self, function: ExpertsForward) -> None:
        self.install(function)
        self.outputs.clear()
        self.hidden.grad = None
        self.block.zero_grad(set_to_none=True)

    def results(self, function: ExpertsForward) -> tuple[list[torch.Tensor], int]:
        """Output and gradients of one pass, in float32, and how often the host had to wait in its forward."""
        self.prepare(function)
        with HostQueries() as queries:
            found = self.block(self.hidden)
        output = found[0] if isinstance(found, tuple) else found
        torch.autograd.backward(output, self.grad)
        gradients = [p.grad for p in (self.hidden, *self.block.parameters()) if p.grad is not None]
        assert len(gradients) >= 2
        return [tensor.detach().float().clone() for tensor in (output, *gradients)], queries.count


def layer_row(
    shape: str, tokens: int, rounds: int, device: torch.device, progress: Progress | None = None
) -> dict[str, Any]:
    """One mixture layer's forward and backward, each arm against the reference."""
    layer = _Layer.of(shape, tokens, device)
    dtype = bench_dtype(device)
    found = {name: layer.results(function) for name, function in LAYER_ARMS.items()}
    shown: dict[str, dict[str, Any]] = {
        name: {"queries": queries, "distance": _nearby(name, results, found[REFERENCE][0], LAYER_LIMIT[dtype])}
        for name, (results, queries) in found.items()
    }
    arms = {
        name: Arm({FORWARD: layer.forward, BACKWARD: layer.backward}, partial(layer.prepare, function))
        for name, function in LAYER_ARMS.items()
    }
    times = _of_one(measure(arms, rounds, WARMUP, clock_for(device), progress))
    for name in arms:
        shown[name]["seconds"] = {part: statistics.median(values) for part, values in times[name].items()}
    parts = (FORWARD, BACKWARD, WHOLE)
    return {
        "part": "layer",
        "shape": shape,
        "tokens": tokens,
        "experts": layer.experts.num_experts,
        "rounds": rounds,
        "arms": shown,
        "comparisons": [compare(times, REFERENCE, name, part) for name in (SORTED, GROUPED) for part in parts],
    }


def _nearby(name: str, ours: list[torch.Tensor], theirs: list[torch.Tensor], limit: float) -> float:
    """The largest relative difference of two lists of tensors; an error beyond ``limit``."""
    assert len(ours) == len(theirs)
    distances = [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]
    if not all(distance <= limit for distance in distances):  # a NaN differs too
        raise ResultsDifferError(f"{name} does not compute what {REFERENCE} computes: {distances}, limit {limit}")
    return max(distances)


# Routing alone


def scaling_row(
    experts: int, tokens: int, rounds: int, device: torch.device, progress: Progress | None = None, top_k: int = 4
) -> dict[str, Any]:
    """What each variant asks the device for, and how long it takes to know whose tokens are whose."""
    draw = torch.Generator(device).manual_seed(0)
    scores = torch.rand(tokens, experts, generator=draw, device=device)
    index_TK = scores.topk(top_k, dim=-1).indices
    shown: dict[str, dict[str, Any]] = {}
    for name, routing in ROUTINGS.items():
        with HostQueries() as queries:
            routing(index_TK, experts)
        shown[name] = {"queries": queries.count}

    def repeated(routing: Callable[[torch.Tensor, int], Any]) -> Arm:
        def chain() -> None:
            for _ in range(REPEATS):
                routing(index_TK, experts)

        return Arm({FORWARD: chain})

    arms = {name: repeated(routing) for name, routing in ROUTINGS.items()}
    times = _of_one(measure(arms, rounds, WARMUP, clock_for(device), progress))
    for name in ROUTINGS:
        shown[name]["seconds"] = statistics.median(times[name][WHOLE])
    return {"part": "scaling", "experts": experts, "tokens": tokens, "top_k": top_k, "rounds": rounds, "arms": shown}


# Whole steps


@dataclass(frozen=True)
class StepCase:
    """One shape's training steps."""

    shape: str
    layers: int
    tokens: int
    on_experts: bool
    rounds: int
    device: torch.device


def step_row(case: StepCase, progress: Progress | None = None) -> dict[str, Any]:
    """Whole steps with each kind of experts, all in the same rounds."""
    row: dict[str, Any] = {
        "part": "step",
        "shape": case.shape,
        "layers": case.layers,
        "tokens": case.tokens,
        "adapters": "attention and experts" if case.on_experts else "attention",
        "rounds": case.rounds,
    }
    bench = _workbench(case)
    try:
        steps = _steps(case, bench)
        row["arms"] = _prove(steps, STEP_LIMIT[bench.dtype])
        arms = {name: step.arm() for name, step in steps.items()}
        times = measure(arms, case.rounds, 1, clock_for(case.device), progress)
        for name in steps:
            row["arms"][name]["seconds"] = {part: statistics.median(values) for part, values in times[name].items()}
        row["comparisons"] = [
            *(compare(times, REFERENCE, name, WHOLE) for name in (SORTED, GROUPED)),
            compare(times, SORTED, GROUPED, WHOLE),
            *(compare(times, name, GROUPED, WHOLE) for name in (STOCK_GROUPED, STOCK_EAGER)),
        ]
    finally:
        restore(bench.model)
        bench.optimizer.zero_grad(set_to_none=True)
        gc.collect()
    return row


def _workbench(case: StepCase) -> Workbench:
    model = adapted_model(shape_config(case.shape, case.layers), case.device, experts=case.on_experts)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    return Workbench(model, case.device, bench_dtype(case.device), optimizer, parameters)


def _steps(case: StepCase, bench: Workbench) -> dict[str, PackedStep]:
    """All arms: ours packed by segments, transformers' by the positions that it is given."""
    documents = random_documents(case.tokens, min(40_000, bench.base.config.vocab_size))
    row = {name: value for name, value in PackedCollator(tokens=case.tokens)(documents).items() if name != "segments"}
    tensors = {name: value.to(case.device) for name, value in row.items()}
    lengths = [len(one["input_ids"]) for one in documents]

    def packed() -> dict[str, Any]:
        segments = Segments.from_lengths(lengths)
        return {**tensors, "segments": segments.pin_memory() if case.device.type == "cuda" else segments}

    attention = "sdpa" if bench.base._supports_sdpa else "eager"
    halves = _Halves(bench)
    ours: dict[str, Callable[[], None]] = {
        REFERENCE: partial(_install_reference, bench.model, halves),
        SORTED: partial(_install_ours, bench.model, halves, "loop"),
        GROUPED: partial(_install_ours, bench.model, halves, "grouped"),
    }
    stock: dict[str, Callable[[], None]] = {
        STOCK_GROUPED: partial(_install_stock, bench, halves, attention, "grouped_mm"),
        STOCK_EAGER: partial(_install_stock, bench, halves, attention, "eager"),
    }
    return {
        **{name: OurStep(bench, install, packed) for name, install in ours.items()},
        **{name: PackedStep(bench, install, partial(dict, tensors)) for name, install in stock.items()},
    }


@dataclass(eq=False)
class OurStep(PackedStep):
    """A step with the trainer's own loss: logits a chunk of tokens at a time."""

    batch_loss: BatchLoss | None = None

    def prepare(self) -> None:
        """Switch to this arm, with a loss that has tried the model's head."""
        super().prepare()
        self.batch_loss = self.batch_loss or BatchLoss(self.bench.model, lambda _: self.bench.autocast())

    def forward(self) -> None:
        """The mean loss of the batch's learned tokens."""
        assert self.batch_loss is not None
        total, _ = self.batch_loss(self.bench.model, self.inputs)
        self.loss = total / learned_tokens(self.inputs["labels"])


@dataclass(eq=False)
class _Halves:
    """The trainer's adapters in half precision, on while an arm of ours runs."""

    bench: Workbench
    adapters: HalfAdapters | None = None

    def on(self) -> None:
        if self.adapters is None:
            self.adapters, _ = HalfAdapters.attach(self.bench.base, self.bench.dtype)

    def off(self) -> None:
        if self.adapters is not None:
            self.adapters.detach()
            self.adapters = None


def _install_ours(model: nn.Module, halves: _Halves, experts: ExpertsChoice) -> None:
    apply(model, Options(experts=experts, activations="recompute"))
    halves.on()


def _install_reference(model: nn.Module, halves: _Halves) -> None:
    _install_ours(model, halves, "loop")
    use_where(model)


def _install_stock(bench: Workbench, halves: _Halves, attention: str, experts: str) -> None:
    """The model as transformers runs it, with the same layers recomputed."""
    halves.off()
    restore(bench.model)
    bench.base.set_attn_implementation(attention)
    bench.base.set_experts_implementation(experts)
    function = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    bench.base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)


def _prove(steps: Mapping[str, PackedStep], limit: float) -> dict[str, dict[str, Any]]:
    """Run every arm once: distance from the reference, host syncs and peak memory; an error where ours differ.

    transformers' arms need not compute the same: where boundaries don't reach a model's attention, documents see each
    other. Their distance is told all the same.
    """
    shown: dict[str, dict[str, Any]] = {}
    reference: Outcome | None = None
    for name, step in steps.items():
        _forget_peak(step.bench.device)
        outcome = Outcome.of(step)
        memory = _peak(step.bench.device)
        reference = reference or outcome
        distance = outcome.distance(reference)
        if name in LAYER_ARMS and not all(value <= limit for value in distance.values()):
            raise ResultsDifferError(f"{name} does not compute what {REFERENCE} computes: {distance}, limit {limit}")
        shown[name] = {
            "loss": float(outcome.losses.mean()),
            "distance": distance,
            "memory_bytes": memory,
            "syncs": _syncs(step),
        }
    return shown


def _syncs(step: PackedStep) -> int | None:
    """How often the host waited for the device in one forward and backward, as PyTorch tells; None without a card."""
    if step.bench.device.type != "cuda":
        return None
    step.prepare()
    torch.cuda.synchronize(step.bench.device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step.forward()
            step.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    step.loss = None
    step.bench.optimizer.zero_grad(set_to_none=True)
    return sum("synchroniz" in str(warning.message) for warning in told)


def _forget_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _of_one(times: Times) -> Times:
    """Seconds of one repeat."""
    return {
        name: {part: [value / REPEATS for value in values] for part, values in parts.items()}
        for name, parts in times.items()
    }


def compare(times: Times, other: str, ours: str, part: str) -> dict[str, Any]:
    """Seconds that ``ours`` saves in a part against ``other``; ``gain``: how much more work a second does.

    ``ratio``: how many times as fast, 1 + gain.
    """
    found = saving(times[other][part], times[ours][part])
    return {
        "against": other,
        "ours": ours,
        "part": part,
        "seconds": found.seconds,
        "ours_seconds": found.ours_seconds,
        "saved_seconds": found.saved.median,
        "saved_low": found.saved.low,
        "saved_high": found.saved.high,
        "ratio": 1 + found.gain.median,
        "gain": found.gain.median,
    }
