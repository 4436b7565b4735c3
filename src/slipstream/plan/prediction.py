"""From a recipe and facts to predictions: what is on, what fits, how long a step and the run take.

1. job      ``job_of``    the recipe's choices, with every ``auto`` resolved as training will
2. memory   ``memory``    by part, against what is free
3. time     ``step_times``  by part, at the device's ceilings
4. gains    ``gains``     the same with one optimisation taken away
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from slipstream.cost.hardware import Device, compute_dtype
from slipstream.cost.job import Job
from slipstream.cost.memory import Memory, memory, room
from slipstream.cost.step import Times, boundary_seconds, step_times
from slipstream.data.packing import PackingReport, pack
from slipstream.decision import Decision
from slipstream.memory.policy import MARGIN
from slipstream.model.attention import Needs, choose_attention
from slipstream.model.load import check_context
from slipstream.plan.facts import Facts, Lengths, Target
from slipstream.prepare import planned_steps, trained_in_place
from slipstream.recipe import Recipe
from slipstream.transform import packing_decision


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
    times: Times
    steps: int
    seconds: float
    """The whole training with its evaluations, without loading."""
    tokens_per_second: float
    """Document tokens, padding not counted."""
    decisions: tuple[Decision, ...]

    @property
    def fits(self) -> bool:
        """Whether the step's memory has room on device and host."""
        host = self.host_room is None or self.memory.host_bytes <= self.host_room
        return self.memory.device_bytes <= self.room and host

    def record(self) -> dict[str, Any]:
        """What a run's records keep, to be shown beside what was measured."""
        return {
            "memory": {"device": _parts(self.memory.device), "host": _parts(self.memory.host)},
            "device_bytes": round(self.memory.device_bytes),
            "host_bytes": round(self.memory.host_bytes),
            "room_bytes": round(self.room),
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
    names = ("tokens", "activations", "attention", "mode", "weights", "nf4", "compute", "optimizer", "rank", "full")
    return {name: getattr(job, name) for name in names}


def _parts(parts: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"name": part.name, "bytes": round(part.bytes), "what": part.what} for part in parts]


def predict(recipe: Recipe, found: Facts, target: Target, *, taken: dict[str, str] | None = None) -> Prediction:
    """Everything about a recipe on a device.

    ``taken``: the choices of ``activations``, ``attention`` and ``mode`` where training itself has made them.
    """
    report, lengths = packing_of(recipe, found.lengths)
    job, decided = job_of(recipe, found, target, report, lengths, taken or {})
    used = memory(job)
    times = step_times(_average(recipe, job, report), target.rates, cpu=target.device.kind == "cpu")
    steps = planned_steps(recipe, report.rows)
    batches = max(1.0, report.rows / recipe.packing.rows)
    return Prediction(
        job=job,
        packing=report,
        memory=used,
        room=room(target.device, target.free),
        host_room=target.host,
        times=times,
        steps=steps,
        seconds=steps * times.total + _evaluations(recipe, found, job, times, steps),
        tokens_per_second=report.tokens / batches * recipe.train.accumulate / times.total,
        decisions=decided,
    )


def packing_of(recipe: Recipe, lengths: Lengths) -> tuple[PackingReport, Lengths]:
    """What packing (or padding) makes of documents, cut to what a row holds, and their lengths then."""
    options = recipe.packing
    cut = np.minimum(lengths, recipe.data.max_length or options.tokens)
    if not options.enabled:
        return PackingReport.unpacked(cut, options.rows, options.tokens), cut
    rows = pack(cut, options.tokens, seed=recipe.train.seed, window=options.window)
    return PackingReport.of(cut, rows, options.tokens), cut


# 1. job


def job_of(
    recipe: Recipe, found: Facts, target: Target, report: PackingReport, lengths: Lengths, taken: dict[str, str]
) -> tuple[Job, tuple[Decision, ...]]:
    """The job, with every choice made as training will make it, and the decisions."""
    attention, attending = _attention(recipe, found, target.device)
    mode, stepping = _mode(recipe)
    full = recipe.adapter.kind == "none"
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
        saved=0 if full else found.saved,
        weights=_weights(recipe, target.device),
        nf4=str(recipe.load.quantize) == "nf4",
        compute=compute_dtype(target.device),
        attention=taken.get("attention", attention),
        mode=taken.get("mode", mode),
        optimizer=recipe.train.optimizer,
        accumulate=recipe.train.accumulate,
    )
    activations, kept = _activations(str(recipe.memory.activations), job, target)
    job = replace(job, activations=taken.get("activations", activations))
    return job, tuple(_decisions(recipe, found, target, [attending, kept, stepping]))


def _widest(recipe: Recipe, lengths: Lengths) -> int:
    """Tokens of the widest padded batch: as many documents as a batch has, each as long as the longest."""
    return int(lengths.max()) * min(recipe.packing.rows, len(lengths))


def _average(recipe: Recipe, job: Job, report: PackingReport) -> Job:
    """The job of an average batch: padded batches differ in width, packed ones don't."""
    if recipe.packing.enabled:
        return job
    return replace(job, tokens=max(1, round(report.padded_tokens / job.batches)))


def _weights(recipe: Recipe, device: Device) -> str:
    if recipe.load.dtype != "auto":
        return recipe.load.dtype
    return "float32" if trained_in_place(recipe) else compute_dtype(device)


def _attention(recipe: Recipe, found: Facts, device: Device) -> tuple[str, Decision]:
    if not recipe.packing.enabled:
        return "varlen", Decision("attention", False, "the model's own: packing.enabled is false")
    dtype: torch.dtype = getattr(torch, compute_dtype(device))
    return choose_attention("auto", Needs.of(found.model), device, dtype)


def _mode(recipe: Recipe) -> tuple[str, Decision]:
    mode = "eager" if recipe.train.mode == "auto" else str(recipe.train.mode)
    reason = "train.mode: auto takes it" if recipe.train.mode == "auto" else f"asked for: train.mode {mode}"
    return mode, Decision("captured step", mode == "captured", f"{mode}: {reason}")


def _activations(asked: str, job: Job, target: Target) -> tuple[str, Decision]:
    """Kept where they fit the margin of what weights and optimizer leave free, else recomputed."""
    if asked != "auto":
        return asked, Decision("recompute", asked != "keep", f"asked for: activations {asked}")
    used = memory(replace(job, activations="keep"))
    moving = {"activations", "loss", "backward", "attention mask"}
    needed = sum(part.bytes for part in used.device if part.name in moving)
    free = room(target.device, target.free) - (used.device_bytes - needed)
    recompute = needed > MARGIN * free
    left = (
        f"{MARGIN:.0%} of the {free / 2**30:.1f} GiB that weights leave" if free > 0 else "what weights leave: nothing"
    )
    verb = "do not fit" if recompute else "fit"
    reason = f"activations and loss of {job.tokens:,} tokens take {needed / 2**30:.1f} GiB and {verb} {left}"
    return "recompute" if recompute else "keep", Decision("recompute", recompute, reason)


def _decisions(recipe: Recipe, found: Facts, target: Target, made: list[Decision]) -> Iterator[Decision]:
    device = target.device
    packing = packing_decision(found.model)
    if not recipe.packing.enabled:
        packing = Decision("packing", False, "packing.enabled: false; documents are padded, one a row")
    yield packing
    yield from made
    half = "multiplies it in hardware" if device.bf16 else "does not multiply it in hardware: float32 is used"
    yield Decision("bf16", device.bf16, f"{device.name} {half}")
    if device.unified_memory and device.kind == "cuda":
        yield Decision("offload", False, f"{device.name} shares one memory with its host: moving frees nothing")
    context = check_context(found.model.config, int(found.lengths.max()), "data.max_length")
    if context is not None:
        yield context


# 3. time


def _evaluations(recipe: Recipe, found: Facts, job: Job, times: Times, steps: int) -> float:
    """Seconds of all evaluations: before the first step, at every ``eval_every``, and after the last."""
    if found.eval_lengths is None:
        return 0.0
    report, _ = packing_of(recipe, found.eval_lengths)
    batches = report.rows / recipe.packing.rows
    every = recipe.train.eval_every
    count = 2 + ((steps - 1) // every if every else 0)
    forward = times.total / recipe.train.accumulate / (job.passes + 2)
    return count * batches * forward


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
    recompute = job.activations != "keep"
    yield "recompute", recompute, replace(job, activations="keep" if recompute else "recompute")
    if card and not device.unified_memory:
        offload = job.activations == "offload"
        yield "offload", offload, replace(job, activations="recompute" if offload else "offload")
        if offload:
            yield "double buffer", job.buffers > 1, replace(job, buffers=1 if job.buffers > 1 else 2)
    if card:
        yield "captured step", job.mode == "captured", replace(job, mode="eager" if job.fused else "captured")
    if any(layer.experts for layer in job.shape.layers):
        grouped = job.experts == "grouped"
        yield "experts by one sort", grouped, replace(job, experts="loop" if grouped else "grouped")
