"""``slipstream bench step``: whole optimizer steps, eager, compiled and captured, beside the matmul floor.

The modes take turns on one model in one process: forward, backward, clipping and update of the same packed row. Beside
each stands the floor, the time that the step's matrix products with the weights would take at the rate measured here:
4 · N · T / rate with frozen weights, 6 · N · T / rate with recompute (N: weights that multiply, T: tokens of the row).
One step of each mode is profiled: how many launches the host makes, and how the kernels' time is shared out: matrix
products, attention, loss, the rest.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.bench.document import document
from slipstream.bench.harness import WHOLE, Arm, clock_for, measure
from slipstream.bench.known_shapes import STEP_ROUNDS, STEP_SHAPES, STEP_TOKENS
from slipstream.bench.progress import Progress
from slipstream.bench.shapes import adapted_model, bench_dtype, random_documents, shape_config
from slipstream.bench.statistics import bootstrap_interval, paired_differences
from slipstream.cost.shape import ModelShape
from slipstream.device.ceilings import measure as measure_ceilings
from slipstream.device.feed import PackedCollator
from slipstream.errors import InputError
from slipstream.memory.checkpointing import checkpoints
from slipstream.memory.policy import ActivationsChoice
from slipstream.step.choice import Mode
from slipstream.train.train_step import TrainStep
from slipstream.transform import Options, apply, base_model, restore

MODES: tuple[Mode, ...] = ("eager", "compiled", "captured")
KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("flash", "fmha", "attention", "softmax_warp"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "gemv", "splitk", "_mm_"),
    "loss": ("logsumexp", "_log_softmax", "nll_loss", "arange_eq", "_gather_"),
}
"""Parts of a step by words in their kernels' names; the first that fits counts, and what fits none is the rest."""
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC", "cudaGraphLaunch")
Say = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class StepBench:
    """What to measure; None takes what suits the device."""

    shapes: tuple[str, ...] | None = None
    """Names from ``shapes.SHAPES`` or ``MIXTURES``; on a card ``qwen3-0.6b``, else ``tiny``."""
    tokens: int | None = None
    """Tokens of the row; 4,096 on a card, else 256."""
    activations: ActivationsChoice = "keep"
    modes: tuple[Mode, ...] = MODES
    rounds: int | None = None
    """Timed rounds; 15 on a card, else 3."""
    layers: int | None = None

    def __post_init__(self) -> None:
        """Refuse what can't be measured before any model is made."""
        for shape in self.shapes or ():
            shape_config(shape, self.layers)
        for mode in self.modes:
            if mode not in MODES:
                raise InputError(f"--mode {mode!r} is none of {', '.join(MODES)}")
        if self.tokens is not None:
            random_documents(self.tokens, 100)


def run(options: StepBench, say: Say, save: Save) -> dict[str, Any]:
    """Measure, and give the result document; ``save`` gets it after each shape."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    rows: list[dict[str, Any]] = []
    ceilings = measure_ceilings(device)
    shapes = options.shapes or STEP_SHAPES.on(cuda)
    result = document("step", device, rows, asked=list(shapes), matmul_flops=ceilings.matmul)
    progress = Progress(say, len(shapes) * len(options.modes), device)
    for shape in shapes:
        rows.append(_measured(options, shape, device, ceilings.matmul, progress))
        save(result)
    return result


def floor_seconds(parameters: int, tokens: int, rate: float, *, recompute: bool) -> float:
    """Seconds of the products of ``tokens`` tokens with frozen weights at ``rate`` operations a second.

    Two operations a weight and token in the forward and two for the inputs' gradients in the backward: 4 · N · T; two
    more where the forward is recomputed: 6 · N · T. Adapters and attention come on top.
    """
    return (6 if recompute else 4) * parameters * tokens / rate


def multiplying_parameters(config: Any) -> int:
    """Weights that a token is multiplied with: of a mixture's experts those that it is given to, and the output head;
    not the input embeddings, which are looked up, nor norms.
    """
    shape = ModelShape.of(config)
    return shape.dense + shape.active_experts + shape.head


def _measured(options: StepBench, shape: str, device: torch.device, rate: float, progress: Progress) -> dict[str, Any]:
    cuda = device.type == "cuda"
    tokens, rounds = options.tokens or STEP_TOKENS.on(cuda), options.rounds or STEP_ROUNDS.on(cuda)
    model = adapted_model(shape_config(shape, options.layers), device)
    apply(model, Options(activations=options.activations, tokens=tokens, compute_dtype=bench_dtype(device)))
    base = base_model(model)
    documents = random_documents(tokens, min(40_000, base.config.vocab_size))
    batch = PackedCollator(tokens=tokens)(documents)
    batch = {name: value.pin_memory() for name, value in batch.items()} if cuda else batch
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    recompute = checkpoints(base)
    parameters = multiplying_parameters(base.config)
    floor = floor_seconds(parameters, tokens, rate, recompute=recompute)
    row: dict[str, Any] = {
        "shape": shape,
        "layers": base.config.num_hidden_layers,
        "tokens": tokens,
        "documents": len(documents),
        "activations": options.activations,
        "parameters": parameters,
        "rounds": rounds,
        "floor_seconds": floor,
        "modes": {},
    }
    arms: dict[str, Arm] = {}
    steps: dict[str, TrainStep] = {}
    for mode in options.modes:
        progress.case(f"{shape}, {tokens:,} tokens, {mode}")
        try:
            steps[mode], first = _started(model, optimizer, mode, batch, device)
        except InputError as error:
            row["modes"][mode] = {"refused": str(error)}
            continue
        row["modes"][mode] = {**first, "decisions": [str(decision) for decision in steps[mode].decisions]}
        arms[mode] = Arm({"step": partial(_once, steps[mode], batch)})
    times = measure(arms, rounds, 2, clock_for(device), progress)
    for name in arms:
        _add_times(row, name, times[name][WHOLE], times[next(iter(arms))][WHOLE])
    for name in arms if cuda else ():
        row["modes"][name]["shares"] = _shares(partial(steps[name], batch))
    for step in steps.values():
        step.close()
    restore(model)
    return row


def _once(step: TrainStep, batch: Mapping[str, Any]) -> None:
    step(batch)


def _started(
    model: Any, optimizer: torch.optim.Optimizer, mode: str, batch: Mapping[str, Any], device: torch.device
) -> tuple[TrainStep, dict[str, Any]]:
    """A step in its mode after its first runs; how long the first took, and the most memory that they held.

    A graph's own memory counts as allocated only while it is recorded, not when it is replayed.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    step = TrainStep(model, optimizer, cast(Mode, mode))
    loss = float(step(batch))
    found: dict[str, Any] = {"first_step_seconds": time.perf_counter() - began, "loss": loss, "ran": step.mode}
    if device.type == "cuda":
        step(batch)
        torch.cuda.synchronize(device)
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return step, found


def _add_times(row: dict[str, Any], mode: str, seconds: list[float], first: list[float]) -> None:
    median = float(torch.tensor(seconds, dtype=torch.float64).median())
    saved = bootstrap_interval(paired_differences(first, seconds))
    row["modes"][mode].update(
        seconds=median,
        tokens_per_second=row["tokens"] / median,
        share_of_floor=row["floor_seconds"] / median,
        saved_seconds=saved.median,
        saved_low=saved.low,
        saved_high=saved.high,
        all_seconds=[round(value, 6) for value in seconds],
    )


def _shares(run: Callable[[], object]) -> dict[str, Any]:
    """Seconds of one step's kernels by kind, the largest of the rest by name, and how many the host launched."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    kernels: dict[str, float] = {}
    launches = 0
    for event in profiler.key_averages():
        if event.device_type.name == "CUDA":
            kernels[event.key] = kernels.get(event.key, 0.0) + event.self_device_time_total / 1e6
        elif event.key in LAUNCHES:
            launches += event.count
    shares = dict.fromkeys((*KINDS, "rest"), 0.0)
    for name, seconds in kernels.items():
        shares[kind_of(name)] += seconds
    rest = sorted(((s, n) for n, s in kernels.items()), reverse=True)[:30]
    return {"seconds": shares, "largest": [[n[:100], s] for s, n in rest], "host_launches": launches}


def kind_of(kernel: str) -> str:
    """The part of a step that a kernel of this name belongs to."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "rest")
