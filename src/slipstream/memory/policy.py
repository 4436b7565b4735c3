"""Keep, recompute or offload: what becomes of a decoder layer's activations between forward and backward.

Keeping costs memory that grows with tokens x layers; recomputing costs a second forward (a third of the step's
arithmetic with frozen weights) and keeps one input a layer; offloading puts that input into host memory. ``auto`` takes
the cheapest split of the layers that the cost model finds to fit the device with a margin: it keeps what fits,
recomputes the rest, and offloads only what does not fit even so.

Bytes are those of ``cost/memory.py``, by which a plan predicts, for an eager step: how steps run is chosen later and
may change while a run goes on, and compiled layers keep less, never more. The price: a compiled step may recompute a
layer that it had room to keep.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from slipstream.cost.hardware import Device, free_bytes, host_memory_limit
from slipstream.cost.job import Job
from slipstream.cost.memory import (
    backward_bytes,
    input_bytes,
    kept_layer_bytes,
    layer_bytes,
    loss_workspace,
    mask_bytes,
    recomputed_layer_bytes,
)
from slipstream.cost.offload import Demand, Split, cheapest_split, rates_of, splits
from slipstream.cost.sizes import size_text
from slipstream.cost.tiles import TilesChoice
from slipstream.data.account import counted
from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.memory.host_budget import HostBudget
from slipstream.memory.offload import buffer_count

MOST_BUFFERS = 1_024
"""More than any model has layers."""
MOST_GIB = 2**20
"""A pebibyte."""
ActivationsChoice = Literal["auto", "keep", "recompute", "offload"]
BuffersChoice = Literal["auto"] | Annotated[int, Ge(1), Le(MOST_BUFFERS)]
HostLimit = Annotated[float, Gt(0), Le(MOST_GIB)] | None
MARGIN = 0.8
"""Share of the free memory that a prediction may fill: the formula is not exact and the allocator fragments."""
HELD = "weights, gradients and optimizer"
"""What a step holds besides what the choice is about."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What becomes of activations (the recipe's ``memory`` section)."""

    activations: ActivationsChoice = "auto"
    """``keep``, ``recompute`` in the backward, ``offload`` to the host; ``auto``: the cheapest that fits, by layer."""
    buffers: BuffersChoice = "auto"
    """Device buffers for reloading offloaded activations; ``auto`` takes two where there is memory for the second."""
    host_limit: HostLimit = None
    """GiB of a machine's host memory that offloaded activations may take, in equal parts for its processes, and never
    more than is free; without it, 80% of what is free."""
    tiles: TilesChoice = "auto"
    """Tokens of a batch that an MLP computes at a time: a number in all layers (of those that are kept, MLPs are then
    computed twice), ``auto`` 8,192 in recomputed layers of batches beyond 32,768, ``none`` all."""


@dataclass(frozen=True)
class Chosen:
    """What becomes of each layer, and why."""

    split: Split | None
    """None: whatever the model does already."""
    decisions: tuple[Decision, Decision]
    """On recomputing, and on offloading."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What the choice is made from."""

    device: Device
    layers: int
    """Decoder layers that can be told apart; 0 where a model treats all alike."""
    job: Job | None
    """What a step computes; its own choice of layers is not looked at. None: not known."""
    unknown: str = "batch size not known here"
    """Why there is no job."""
    pending_bytes: int = 0
    """Device memory that training will take besides activations: gradients and optimizer states."""
    buffers: BuffersChoice = "auto"
    host: HostBudget = HostBudget(0)  # noqa: RUF009 - frozen
    """Host memory that offloaded activations may take."""
    free_bytes: int | None = None
    """Device memory free for activations and what is pending; None: what the device has free now."""


def choose_activations(asked: ActivationsChoice, now: Situation) -> Chosen:
    """What becomes of each layer's activations. Raises ``InputError`` for host memory too small for ``offload``."""
    if asked == "offload":
        return _offload_asked(now)
    if asked != "auto":
        reason = f"asked for: activations {asked}"
        split = _all(now, asked)
        return Chosen(split, (Decision("recompute", asked == "recompute", reason), Decision("offload", False, reason)))
    if now.job is None:
        reason = f"{now.unknown}, so activations are kept"
        return Chosen(_all(now, "keep"), (Decision("recompute", False, reason), Decision("offload", False, reason)))
    return _cheapest(now, now.job)


def _all(now: Situation, what: Literal["keep", "recompute"]) -> Split:
    """The same for every layer; a model that can't tell its layers apart counts as one."""
    layers = max(1, now.layers)
    return Split(layers, 0, 0) if what == "keep" else Split(0, layers, 0)


def _offload_asked(now: Situation) -> Chosen:
    obstacle = _obstacle(now)
    if obstacle is not None:
        recompute = Decision("recompute", True, f"in place of offload: {obstacle}")
        return Chosen(_all(now, "recompute"), (recompute, Decision("offload", False, obstacle)))
    split = Split(0, 1, now.layers - 1)
    if now.job is not None:
        size = int(input_bytes(now.job))
        if split.offloaded * size > now.host.nbytes:
            raise InputError(now.host.shortage(split.offloaded, size))
    reason = f"asked for: the inputs of {split.offloaded} of {now.layers} layers wait in host memory"
    if now.device.unified_memory:
        reason += f"; {now.device.name} shares one memory with the host, so that this frees nothing and takes time"
    if now.host.cut is not None:
        reason += f"; {now.host.cut}"
    recompute = Decision("recompute", True, "offloaded layers are recomputed from their inputs")
    return Chosen(split, (recompute, Decision("offload", True, reason)))


def _obstacle(now: Situation) -> str | None:
    """Why layer inputs can't be moved to the host here at all."""
    if (obstacle := offload_obstacle(now.device)) is not None:
        return obstacle
    if now.layers < 2:
        return "this model's layers can't be told apart, so no layer's input can be moved by itself"
    return None


def offload_obstacle(device: Device) -> str | None:
    """Why nothing can be moved off this device, or None."""
    if device.kind != "cuda":
        return "this device's memory is the host's: there is nowhere to move activations to"
    return None


def offload_in_vain(device: Device) -> str | None:
    """Why moving activations off this device frees nothing, so that ``auto`` leaves it, or None."""
    if device.unified_memory:
        return f"{device.name} shares one memory with the host: moving activations there frees nothing"
    return None


def _why_not_auto(now: Situation) -> str | None:
    """Why ``auto`` does not consider offloading."""
    return _obstacle(now) or offload_in_vain(now.device)


def _cheapest(now: Situation, job: Job) -> Chosen:
    demand = demand_of(now, job)
    free = _free(now)
    usable = int(MARGIN * free)
    not_offload = _why_not_auto(now)
    found = cheapest_split(demand, usable, now.host.nbytes, offload=not_offload is None)
    split = found or _least_memory(demand, now, offload=not_offload is None)
    kept = demand.device_bytes(Split(demand.layers, 0, 0))
    eager = f"an eager step of {counted(job.tokens, 'token')} that keeps all activations"
    what = f"{eager} takes about {size_text(kept)} at its peak"
    room = _room(free)
    if split.kept == split.layers:
        reason = f"{what}, and fits {room}"
        return Chosen(split, (Decision("recompute", False, reason), Decision("offload", False, "everything fits")))
    again = split.recomputed + split.offloaded
    treated = f"{again} of {counted(split.layers, 'layer')} {'is' if again == 1 else 'are'} recomputed"
    short = "" if found else f"; even so it takes {size_text(demand.device_bytes(split))} besides, so it may not run"
    recompute = Decision("recompute", True, f"{what}, and doesn't fit {room}: {treated}{short}")
    moved = not_offload or _moved(split, demand, now, usable, fits=found is not None)
    return Chosen(split, (recompute, Decision("offload", split.offloaded > 0, moved)))


def _free(now: Situation) -> int:
    """Bytes of the device that activations may fill."""
    return max(0, (free_on(now.device) if now.free_bytes is None else now.free_bytes) - now.pending_bytes)


def _room(free: int) -> str:
    """What a prediction may fill, in words."""
    free_part = f"{MARGIN:.0%} of the {size_text(free)} that {HELD} leave free"
    return free_part if free else f"a device that {HELD} already fill"


def _moved(split: Split, demand: Demand, now: Situation, usable: int, *, fits: bool) -> str:
    """How many layer inputs wait in host memory, and why; how much of it the step needs where it is short."""
    host, count, room = now.host, split.offloaded, _room(_free(now))
    if fits and not count:
        return "the inputs of recomputed layers fit the device"
    waiting = (
        f"the inputs of {count} of {split.layers} layers, {size_text(demand.host_bytes(split))}, wait in host memory"
    )
    if fits:
        cut = "" if host.cut is None else f"; {host.cut}"
        return f"{waiting}: with them on the device the step would not fit {room}{cut}"
    told = f"{waiting}; " if count else ""
    enough = [each for each in splits(demand.layers, offload=True) if demand.device_bytes(each) <= usable]
    if not enough and count == split.layers - 1:
        return f"{told}even so the step would not fit {room}"
    if not enough:
        return f"{told}with all inputs but the last layer's in host memory the step would not fit {room} either"
    needed = min(demand.host_bytes(each) for each in enough)
    inputs = counted(needed // demand.input_bytes, "layer input")
    why = f" ({host.why})" if host.why else ""
    may = f"may take {size_text(host.nbytes)}{why}; {host.room_for(needed)}"
    return f"{told}host memory is short: the step would fit {room} with {size_text(needed)} there ({inputs}), and {may}"


def demand_of(now: Situation, job: Job) -> Demand:
    """The choice in bytes and seconds, every layer as its model's largest."""
    eager, shape = replace(job, mode="eager"), job.shape
    layers, rates = max(1, now.layers), rates_of(now.device)
    largest = max(shape.layers, key=lambda layer: layer_bytes(eager, layer))
    kept = kept_layer_bytes(eager, largest) * shape.depth / layers
    recomputed = recomputed_layer_bytes(replace(eager, split=Split(0, shape.depth, 0)), largest)
    size = int(input_bytes(job))
    return Demand(
        layers=layers,
        kept_bytes=int(kept),
        input_bytes=size,
        fixed_bytes=int(loss_workspace(eager)),
        working_bytes=int(job.tokens * backward_bytes(job, largest)),
        recomputed_bytes=int(recomputed) if layers == shape.depth else None,
        constant_bytes=int(mask_bytes(job)),
        buffers=buffer_count(now.buffers),
        forward_seconds=2 * job.tokens * (shape.dense + shape.active_experts) / layers / rates.flops,
        copy_seconds=size / rates.link,
    )


def _least_memory(demand: Demand, now: Situation, *, offload: bool) -> Split:
    """What asks least of the device where nothing is predicted to fit: offload what the host has room for."""
    room = now.host.nbytes // demand.input_bytes if offload else 0
    offloaded = min(demand.layers - 1, room)
    return Split(0, demand.layers - offloaded, offloaded)


def free_on(device: Device) -> int:
    """Bytes free for activations: a card's, as torch tells it, or what this process may use of a host's memory."""
    return free_bytes("cuda") if device.kind == "cuda" else min(device.memory_bytes, host_memory_limit())
