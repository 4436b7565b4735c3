"""From a recipe and facts to predictions: what is on, what fits, how long a step and the run take.

1. job      ``job_of``    the recipe's choices, with every ``auto`` resolved as training will
2. memory   ``memory``    by part, against what is free
3. time     ``step_times``  by part, at the device's ceilings
4. gains    ``gains``     the same with one optimisation taken away
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from slipstream.cost.hardware import Device, compute_dtype
from slipstream.cost.job import Job
from slipstream.cost.memory import (
    CONTEXT,
    Memory,
    gradient_bytes,
    input_bytes,
    memory,
    room,
    state_bytes,
    weight_bytes,
)
from slipstream.cost.offload import Split
from slipstream.cost.step import Times, boundary_seconds, step_times
from slipstream.cost.tiles import TilesChoice, tile_tokens
from slipstream.data.packing import PackingReport, pack
from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.memory.checkpointing import check_recomputes
from slipstream.memory.host_budget import UNLIMITED, HostBudget, budget_of
from slipstream.memory.offload import buffer_count
from slipstream.memory.policy import Situation, choose_activations
from slipstream.model.attention import choose_attention
from slipstream.model.experts_choice import choose_experts
from slipstream.model.load import check_context
from slipstream.model.norms import choose_norms
from slipstream.model.rotary import scaled_by_length
from slipstream.model.tiled_mlp import tiled_decision
from slipstream.plan.facts import Facts, Lengths, Target
from slipstream.prepare import UNPACKED, planned_steps, trained_in_place
from slipstream.recipe import Recipe
from slipstream.step.choice import Circumstances, choose_mode, compiler_obstacle, trains_whole
from slipstream.train.options import ALONE


@dataclass(frozen=True)
class Gain:
    """What one optimisation changes against the same step without it."""

    name: str
    on: bool
    seconds: float
    """Seconds a step that it saves (below 0: costs); what it would save, where it is off."""
    bytes: float
    """Device memory at the peak that it saves, likewise."""


@dataclass(frozen=True)
class Prediction:
    """What a recipe comes to on a device."""

    job: Job
    packing: PackingReport
    memory: Memory
    room: float
    """Device bytes that the step may fill."""
    host_room: float | None
    """Host bytes that offloaded activations may take; None where not known."""
    times: Times
    steps: int
    evaluations: int
    """Times that held-out rows are gone through."""
    seconds: float
    """The whole training with its evaluations, without loading."""
    tokens_per_second: float
    """Document tokens, padding not counted."""
    decisions: tuple[Decision, ...]

    @property
    def fits(self) -> bool:
        """Whether the step's memory has room on device and host."""
        return self.fits_device and self.fits_host

    @property
    def fits_device(self) -> bool:
        """Whether the device has room."""
        return self.memory.device_bytes <= self.room

    @property
    def fits_host(self) -> bool:
        """Whether the host has room for what leaves the device."""
        return self.host_room is None or self.memory.host_bytes <= self.host_room

    def record(self) -> dict[str, Any]:
        """What a run's records keep, to be shown beside what was measured."""
        return {
            "memory": {"device": _parts(self.memory.device), "host": _parts(self.memory.host)},
            "device_bytes": round(self.memory.device_bytes),
            "host_bytes": round(self.memory.host_bytes),
            "room_bytes": round(self.room),
            "host_room_bytes": None if self.host_room is None else round(self.host_room),
            "step_seconds": self.times.total,
            "floor_seconds": self.times.floor,
            "times": {**asdict(self.times), "device": self.times.device},
            "steps": self.steps,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "choices": choices(self.job),
        }


def choices(job: Job) -> dict[str, Any]:
    """The choices of a job that a recipe or an ``auto`` made."""
    names = ("tokens", "attention", "experts", "mode", "weights", "nf4", "compute", "optimizer", "rank", "full")
    return {"activations": asdict(job.layers), **{name: getattr(job, name) for name in names}}


def _parts(parts: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"name": part.name, "bytes": round(part.bytes), "what": part.what} for part in parts]


@dataclass(frozen=True)
class Taken:
    """Choices that training has made already; None where it has not."""

    attention: str | None = None
    split: Split | None = None
    packing: Decision | None = None


def predict(recipe: Recipe, found: Facts, target: Target, taken: Taken | None = None) -> Prediction:
    """Everything about a recipe on a device. ``taken``: what training itself has decided, where it has."""
    report, lengths = packing_of(recipe, found)
    job, decided = job_of(recipe, found, target, report, lengths, taken or Taken())
    used = memory(job)
    times = step_times(_average(recipe, job, report), target.rates, cpu=target.device.kind == "cpu")
    steps = planned_steps(recipe, report.rows)
    evaluations = _evaluations(recipe, found, steps)
    batches = max(1.0, report.rows / recipe.packing.rows)
    return Prediction(
        job=job,
        packing=report,
        memory=used,
        room=room(target.device, target.free),
        host_room=_host_room(budget_of(recipe.memory.host_limit, target.host)),
        times=times,
        steps=steps,
        evaluations=evaluations,
        seconds=steps * times.total + evaluations * _evaluation_seconds(recipe, found, job, times),
        tokens_per_second=report.tokens / batches * job.accumulate / times.total,
        decisions=decided,
    )


def packing_of(recipe: Recipe, found: Facts, *, held_out: bool = False) -> tuple[PackingReport, Lengths]:
    """What packing (or padding) makes of documents, cut to what a row holds, and their lengths then; made once for all
    predictions that ask the same.
    """
    options, limit, overlong = recipe.packing, document_limit(recipe), recipe.data.overlong
    batch = None if options.enabled else options.rows  # packed rows are the same whatever number makes a batch
    asked = (held_out, limit, overlong, options.tokens, options.window, batch, recipe.train.seed)
    if asked not in found.packings:
        lengths = found.eval_lengths if held_out else found.lengths
        assert lengths is not None
        found.packings[asked] = _packed(recipe, _limited(lengths, limit, overlong))
    return found.packings[asked]


def document_limit(recipe: Recipe) -> int:
    """The most tokens that a document may have."""
    return recipe.data.max_length or recipe.packing.tokens


def _limited(lengths: Lengths, limit: int, overlong: str) -> Lengths:
    """Lengths of what ``overlong`` leaves of documents. Raises ``InputError`` where that is nothing."""
    if overlong == "drop":
        lengths = lengths[lengths <= limit]
        if not len(lengths):
            raise InputError(
                f"data.overlong: drop leaves no document of at most {limit:,} tokens; raise packing.tokens"
            )
    if overlong == "split":
        whole, rest = np.divmod(lengths, limit)
        lengths = np.concatenate([np.full(int(whole.sum()), limit), rest[rest > 0]])
    return np.minimum(lengths, limit)


def _packed(recipe: Recipe, lengths: Lengths) -> tuple[PackingReport, Lengths]:
    options = recipe.packing
    if not options.enabled:
        return PackingReport.unpacked(lengths, options.rows, options.tokens), lengths
    rows = pack(lengths, options.tokens, seed=recipe.train.seed, window=options.window)
    return PackingReport.of(lengths, rows, options.tokens), lengths


# 1. job


def job_of(
    recipe: Recipe, found: Facts, target: Target, report: PackingReport, lengths: Lengths, taken: Taken
) -> tuple[Job, tuple[Decision, ...]]:
    """The job, with every choice made as training will make it, and the decisions."""
    full = recipe.adapter.kind == "none"
    attention, attending = _attention(recipe, found, target.device, taken)
    experts, routing = _experts(found, target.device)
    tokens = recipe.packing.tokens * recipe.packing.rows if recipe.packing.enabled else _widest(recipe, lengths)
    job = Job(
        shape=found.shape,
        tokens=tokens,
        lengths=lengths,
        batches=max(1.0, report.rows / recipe.packing.rows),
        full=full,
        rank=0 if full else recipe.adapter.rank,
        adapted=() if full else found.adapted,
        adapted_experts=bool(recipe.adapter.experts),
        saved=0 if full else found.saved + found.rows,
        early_gradient=not found.rows,  # a head with rows of its own is no plain product
        weights=weights_dtype(recipe, target.device),
        nf4=str(recipe.load.quantize) == "nf4",
        compute=compute_dtype(target.device),
        attention=attention or "varlen",
        experts=experts,
        optimizer=recipe.train.optimizer,
        accumulate=min(recipe.train.accumulate, max(1, math.ceil(report.rows / recipe.packing.rows))),
        tiles="none" if found.untiled else recipe.memory.tiles,
    )
    mode, stepping = _mode(recipe, found, target, job, attention)
    _, norms = choose_norms("auto", found.model, target.device)
    job = replace(job, mode=mode, one_kernel_norms=norms.on)
    split, kept = _activations(recipe, job, target)
    if split is not None and split.kept < split.layers:
        check_recomputes(found.model)
    job = replace(job, split=taken.split or split, buffers=buffer_count(recipe.memory.buffers))
    tiling = _tiling(recipe.memory.tiles, found, job)
    return job, tuple(_decisions(recipe, found, target, taken, [attending, *kept, *tiling, norms, stepping, *routing]))


def _tiling(asked: TilesChoice, found: Facts, job: Job) -> list[Decision]:
    """What training will tell of tiles; nothing where rows are too short for them."""
    if asked == "none":
        return [Decision("tiled mlp", False, "asked for: tiles none")]
    recomputed = job.layers.kept < job.layers.layers
    if found.untiled and tile_tokens(asked, job.tokens, recomputed=recomputed):
        return [Decision("tiled mlp", False, found.untiled)]
    if job.tile is None:
        return []
    return [tiled_decision(job.layers.layers - (job.layers.kept if job.tiles == "auto" else 0), job.tile)]


def _widest(recipe: Recipe, lengths: Lengths) -> int:
    """Tokens of the widest padded batch: as many documents as a batch has, each as long as the longest."""
    return int(lengths.max()) * min(recipe.packing.rows, len(lengths))


def _average(recipe: Recipe, job: Job, report: PackingReport) -> Job:
    """The job of an average batch: padded batches differ in width, packed ones don't."""
    if recipe.packing.enabled:
        return job
    return replace(job, tokens=max(1, round(report.padded_tokens / job.batches)))


def weights_dtype(recipe: Recipe, device: Device) -> str:
    """The dtype that training loads weights in."""
    if recipe.load.dtype != "auto":
        return recipe.load.dtype
    return "float32" if trained_in_place(recipe) else compute_dtype(device)


def _attention(recipe: Recipe, found: Facts, device: Device, taken: Taken) -> tuple[str | None, Decision]:
    if not recipe.packing.enabled:
        return None, UNPACKED["attention"]
    if taken.attention is not None:
        return taken.attention, Decision("attention", True, f"{taken.attention}: what training has chosen")
    packing, needs = found.packed
    assert needs is not None, f"check_packing has let pass: {packing.reason}"
    return choose_attention("auto", needs, device, _dtype(device))


def _dtype(device: Device) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, compute_dtype(device))
    return dtype


def _experts(found: Facts, device: Device) -> tuple[str, list[Decision]]:
    """How experts are computed, and the decision; none for a dense model."""
    if not found.shape.routed:
        return "grouped", []
    choice, decision = choose_experts("auto", found.model, device, _dtype(device))
    return choice or "loop", [decision]


def _mode(recipe: Recipe, found: Facts, target: Target, job: Job, attention: str | None) -> tuple[str, Decision]:
    """How steps run; a compiler is looked for on this machine, and taken for granted on another."""
    about = Circumstances(
        device=target.device,
        packed=recipe.packing.enabled,
        attention=attention,
        host_positions=recipe.packing.enabled and bool(scaled_by_length(found.model)),
        host_experts=bool(found.shape.routed) and job.experts == "loop",
        whole=trains_whole(job.trained, job.shape.parameters + (0 if job.full else job.trained)),
        compiler=compiler_obstacle(target.device) if target.here else None,
    )
    return choose_mode(recipe.train.mode, about)


def _activations(recipe: Recipe, job: Job, target: Target) -> tuple[Split | None, tuple[Decision, ...]]:
    """What training's own policy decides, given what weights will leave free of the device.

    Offloading that is asked for and finds no room on the host is what a training refuses; a plan has it predicted, so
    that it can say what to change.
    """
    free = target.device.memory_bytes - CONTEXT if target.free is None else target.free
    options = recipe.memory
    host = budget_of(options.host_limit, target.host)
    now = Situation(
        device=target.device,
        layers=job.shape.depth,
        job=job,
        pending_bytes=round(gradient_bytes(job) + state_bytes(job)),
        buffers=options.buffers,
        host=replace(host, nbytes=UNLIMITED) if options.activations == "offload" else host,
        free_bytes=max(0, round(free - weight_bytes(job) - (0 if job.full else 4 * job.trained))),
    )
    chosen = choose_activations(options.activations, now)
    return chosen.split, (*chosen.decisions, *_shortage(chosen.split, job, host, options.activations))


def _shortage(split: Split | None, job: Job, host: HostBudget, asked: str) -> Iterator[Decision]:
    """What a training says of offloading that it was asked for and has no room for."""
    size = int(input_bytes(job))
    if asked == "offload" and split is not None and split.offloaded * size > host.nbytes:
        yield Decision("host memory", False, host.shortage(split.offloaded, size))


def _host_room(host: HostBudget) -> float | None:
    return None if host.limit is None and host.free is None else host.nbytes


def _decisions(recipe: Recipe, found: Facts, target: Target, taken: Taken, made: list[Decision]) -> Iterator[Decision]:
    device = target.device
    yield (taken.packing or found.packed[0]) if recipe.packing.enabled else UNPACKED["packing"]
    yield from made
    half = "multiplies it in hardware" if device.bf16 else "does not multiply it in hardware: float32 is used"
    yield Decision("bf16", device.bf16, f"{device.name} {half}")
    if recipe.train.sharding != "none":
        yield Decision("sharding", False, f"a plan is for one process, with all weights in it, and {ALONE}")
    context = check_context(found.model.config, found.longest, "data.max_length")
    if context is not None:
        yield context


# 3. time


def _evaluations(recipe: Recipe, found: Facts, steps: int) -> int:
    """Evaluations of a run: before the first step, at every ``eval_every``, and after the last."""
    if found.eval_lengths is None:
        return 0
    every = recipe.train.eval_every
    return 2 + ((steps - 1) // every if every else 0)


def _evaluation_seconds(recipe: Recipe, found: Facts, job: Job, times: Times) -> float:
    """Seconds of one evaluation."""
    if found.eval_lengths is None:
        return 0.0
    report, _ = packing_of(recipe, found, held_out=True)
    batches = report.rows / recipe.packing.rows
    return batches * times.total / job.accumulate / (job.passes + 2)


# 4. gains


def gains(recipe: Recipe, prediction: Prediction, target: Target) -> list[Gain]:
    """Each optimisation's predicted gain: time and memory of the step with and without it."""
    job = _average(recipe, prediction.job, prediction.packing)
    found = [Gain("packing", True, _padding_seconds(recipe, prediction), 0.0)] if recipe.packing.enabled else []
    if recipe.packing.enabled and prediction.packing.rows:
        found.append(Gain("boundaries built once", True, boundary_seconds(job, target.rates), 0.0))
    for name, on, other in _toggles(job, target.device):
        found.append(_gain(name, on, job, other, target))
    return found


def _padding_seconds(recipe: Recipe, prediction: Prediction) -> float:
    """What a step would take longer if its documents were padded: the tokens computed, over those that packing does."""
    return (prediction.packing.padded_ratio - 1) * prediction.times.total


def _gain(name: str, on: bool, job: Job, other: Job, target: Target) -> Gain:
    """``other`` is the job with the optimisation the other way round."""
    cpu = target.device.kind == "cpu"
    seconds = step_times(other, target.rates, cpu=cpu).total - step_times(job, target.rates, cpu=cpu).total
    size = memory(other).device_bytes - memory(job).device_bytes
    sign = 1 if on else -1
    return Gain(name, on, sign * seconds, sign * size)


def _toggles(job: Job, device: Device) -> Iterator[tuple[str, bool, Job]]:
    card = device.kind == "cuda"
    yield "chunked loss", job.chunked_loss, replace(job, chunked_loss=not job.chunked_loss)
    counts, all_as = job.layers, partial(replace, job, split=None)
    recompute = counts.kept < counts.layers
    yield "recompute", recompute, all_as(activations="keep" if recompute else "recompute")
    if card and not device.unified_memory:
        offload = counts.offloaded > 0
        yield "offload", offload, all_as(activations="recompute" if offload else "offload")
        if offload:
            yield "double buffer", job.buffers > 1, replace(job, buffers=1 if job.buffers > 1 else 2)
    if job.tile is not None:
        yield "tiled mlp", True, replace(job, tiles="none")
    if card:
        yield "captured step", job.mode == "captured", replace(job, mode="eager" if job.fused else "captured")
    if any(layer.experts for layer in job.shape.layers):
        grouped = job.experts == "grouped"
        yield "grouped experts", grouped, replace(job, experts="loop" if grouped else "grouped")
