"""What this machine can do for Slipstream, and for what it cannot, the reason.

The report is made of plain values, so that the command line can print it as JSON, a bug report can carry it whole, and
``slipstream plan --device FILE`` can plan for this machine elsewhere. Capabilities are asked, not tried; running each
kernel once would prove more and take a minute. Only the ceilings of the device are measured, in a few seconds and once
(``device/ceilings.py``).
"""

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from slipstream.cost.hardware import (
    Device,
    available_memory,
    cgroup_limit,
    compute_dtype,
    cpu_has_bf16,
    describe,
    free_host_memory,
    machine_memory,
)
from slipstream.cost.tiles import LONG_ROW, TILE
from slipstream.device.driver import driver_version
from slipstream.errors import InputError
from slipstream.memory.policy import MARGIN, offload_in_vain, offload_obstacle
from slipstream.model.attention import KERNELS, WHAT, Needs, choose_attention
from slipstream.model.experts_choice import WHAT as EXPERTS
from slipstream.model.experts_choice import auto_experts, grouped_obstacle
from slipstream.model.norms import norms_obstacle
from slipstream.model.quantize import check_quantize
from slipstream.step.choice import (
    Circumstances,
    capture_obstacle,
    choose_mode,
    compile_obstacle,
    compiler_obstacle,
)
from slipstream.train.options import TrainOptions, check_optimizer
from slipstream.versions import SLIPSTREAM, library_versions

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

GIB = 1024**3
DENSE = Needs(head_width=64, value_width=64)
"""What most models need of attention."""
SINKS = replace(DENSE, sinks=True)
TAKEN = "; what auto takes"
MODES: Mapping[str, str] = MappingProxyType(
    {
        "captured": "a CUDA graph replays forward, loss and backward in one launch",
        "compiled": "layers are compiled, elementwise kernels fused",
        "eager": "each kernel is launched from Python",
    }
)


@dataclass(frozen=True)
class Capability:
    """Something Slipstream can use here, or why it cannot."""

    name: str
    available: bool
    reason: str


def report(*, fresh: bool = False) -> dict[str, Any]:
    """Examine this machine: devices, driver, versions, host memory (bytes), capabilities with their reasons, and the
    ceilings of the device that would train (operations, bytes and seconds); ``fresh`` measures those again.
    """
    import torch

    from slipstream.device.ceilings import ceilings

    cards = [describe(f"cuda:{index}") for index in range(torch.cuda.device_count())] if _cuda_works() else []
    host = describe("cpu")
    driver = driver_version()
    return {
        "slipstream": SLIPSTREAM,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [asdict(device) for device in (*cards, host)],
        "cpu": {"name": host.name, "cores": usable_cores(), "bf16": cpu_has_bf16()},
        "driver": driver,
        "cuda": torch.version.cuda,
        "versions": library_versions(),
        "host_memory": {
            "machine_bytes": machine_memory(),
            "available_bytes": available_memory(),
            "cgroup_limit_bytes": cgroup_limit(),
            "usable_bytes": free_host_memory(),
        },
        "capabilities": [
            asdict(found) for found in capabilities(cards, host, no_cuda_reason(torch.version.cuda, driver))
        ],
        "ceilings": asdict(ceilings("cuda" if cards else "cpu", driver if cards else None, fresh=fresh)),
    }


def capabilities(cards: list[Device], host: Device, no_cuda: str) -> Iterator[Capability]:
    """What the device that would train (the first card, else the CPU) offers; ``no_cuda`` says why there is no card.

    A choice is available where a recipe that names it gets it; the reasons are those of the functions that decide when
    a model is trained (``docs/support.md`` has their answers for other devices).
    """
    device = cards[0] if cards else host
    yield Capability("training on CUDA", bool(cards), device.name if cards else no_cuda)
    yield Capability(f"load.dtype auto takes {compute_dtype(device)}", True, _bf16_reason(device))
    yield Capability("bf16 compute", device.bf16, _bf16_reason(device))
    yield Capability("packing", True, "boundaries are built once a batch; which models can be packed, a plan says")
    yield from _attention(device)
    yield from _activations(device)
    yield from _experts(device)
    yield from _steps(device)
    yield _asked("NF4 weights", lambda: check_quantize("nf4", has_card=device.kind == "cuda"))
    yield _asked("8-bit optimizer", lambda: check_optimizer(TrainOptions(optimizer="adamw8bit")))


def no_cuda_reason(built_for: str | None, driver: str | None) -> str:
    """Why torch sees no card, from the CUDA version it is built for and the driver's version."""
    if driver is None:
        return "no NVIDIA driver answers; training runs on the CPU"
    if built_for is None:
        return f"driver {driver} is there, but this torch is built without CUDA; install a CUDA build of torch"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r} leaves no card visible; unset it"
    return f"driver {driver} does not work with torch's CUDA {built_for}; update the driver"


def usable_cores() -> int:
    """Cores this process may run on, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def show(found: dict[str, Any], console: "Console") -> None:
    """Print a report as tables for people."""
    from rich.table import Table

    machine = Table(title="machine", show_header=False, title_justify="left")
    for name, value in _machine_rows(found):
        machine.add_row(name, value)
    offers = Table("capability", "available", "why", title="capabilities", title_justify="left")
    for capability in found["capabilities"]:
        offers.add_row(capability["name"], "yes" if capability["available"] else "no", capability["reason"])
    console.print(machine)
    console.print(_ceilings_table(found["ceilings"]))
    console.print(offers)


def _ceilings_table(rates: dict[str, Any]) -> "Table":
    from rich.table import Table

    table = Table("ceiling", "at best", title="measured once, kept", title_justify="left")
    table.add_row(f"matrix product, {rates['dtype']}", f"{rates['matmul'] / 1e12:.3g} TFLOP/s")
    table.add_row("copy within its memory, read + write", f"{rates['copy'] / 1e9:,.4g} GB/s")
    links = {"pinned host → device": "to_device", "device → pinned host": "to_host", "pageable → device": "pageable"}
    for name, key in links.items():
        rate = rates[key]
        table.add_row(name, "one memory" if rate is None else f"{rate / 1e9:.3g} GB/s")
    table.add_row("one launch from Python", f"{rates['launch'] * 1e6:.3g} µs")
    table.add_row("one wait for an idle device", f"{rates['sync'] * 1e6:.3g} µs" if rates["sync"] else "none")
    return table


def _machine_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for index, device in enumerate(found["devices"]):
        yield f"device {index}", _device_line(device)
    yield "CPU cores", str(found["cpu"]["cores"])
    yield "host memory", _memory_line(found["host_memory"])
    yield "driver", found["driver"] or "absent"
    yield "CUDA of torch", found["cuda"] or "absent"
    yield "slipstream", found["slipstream"]
    yield "python", f"{found['python']} on {found['platform']}"
    for name, installed in found["versions"].items():
        yield name, installed or "absent"


def _device_line(device: dict[str, Any]) -> str:
    parts = [f"{device['kind']}: {device['name']}", f"{device['memory_bytes'] / GIB:.1f} GiB"]
    if device["compute_capability"] is not None:
        major, minor = device["compute_capability"]
        parts.append(f"compute capability {major}.{minor}")
        parts.append("memory shared with the host" if device["unified_memory"] else "memory of its own")
    parts.append("bf16" if device["bf16"] else "no bf16")
    return ", ".join(parts)


def _memory_line(memory: dict[str, Any]) -> str:
    limit = memory["cgroup_limit_bytes"]
    container = "no container limit" if limit is None else f"container limit {limit / GIB:.1f}"
    return (
        f"{memory['usable_bytes'] / GIB:.1f} GiB usable (machine {memory['machine_bytes'] / GIB:.1f}, "
        f"available {memory['available_bytes'] / GIB:.1f}, {container})"
    )


def _cuda_works() -> bool:
    import torch

    return torch.cuda.is_available()


def _attention(device: Device) -> Iterator[Capability]:
    """Each kernel for a model of plain dot products, and whether it takes attention sinks too."""
    dtype = _dtype(device)
    auto, _ = choose_attention("auto", DENSE, device, dtype)
    for name, kernel in KERNELS.items():
        obstacle, with_sinks = (kernel.obstacle(needs, device, dtype) for needs in (DENSE, SINKS))
        if obstacle is None:
            why = WHAT[name] + TAKEN * (name == auto)
            why += f"; not with attention sinks (gpt-oss): {with_sinks}" if with_sinks else ""
        else:
            why = f"{obstacle}; auto takes {auto}"
        yield Capability(f"attention {name}", obstacle is None, why)


def _activations(device: Device) -> Iterator[Capability]:
    yield Capability("activations keep", True, f"what auto does where a step fits {MARGIN:.0%} of the free memory")
    yield Capability("activations recompute", True, "what auto does with layers that do not fit")
    obstacle, in_vain = offload_obstacle(device), offload_in_vain(device)
    why = "what auto does where recomputing alone does not fit: layer inputs wait in host memory"
    if obstacle is None and in_vain:
        why = f"where asked for; auto never does: {in_vain}"
    yield Capability(
        "activations offload", obstacle is None, why if obstacle is None else f"{obstacle}; recompute is taken for it"
    )
    tiles = f"auto: {TILE:,} tokens at a time in recomputed layers of batches beyond {LONG_ROW:,} tokens"
    yield Capability("tiled mlp", True, tiles)
    against = norms_obstacle(device)
    yield Capability("norms", against is None, against or "RMS norms as one kernel where layers aren't compiled")


def _experts(device: Device) -> Iterator[Capability]:
    """How a mixture's experts are computed, of widths that a grouped product takes."""
    obstacle = grouped_obstacle([], device, _dtype(device))
    auto, against = auto_experts(obstacle, device)
    grouped = EXPERTS["grouped"] + TAKEN * (auto == "grouped") + (f"; auto takes loop: {against}" if against else "")
    yield Capability("experts grouped", obstacle is None, f"{obstacle}; auto takes loop" if obstacle else grouped)
    yield Capability("experts loop", True, EXPERTS["loop"] + TAKEN * (auto == "loop"))


def _steps(device: Device) -> Iterator[Capability]:
    """How the step of a dense model with adapters can run; what else bears on it is told beside the captured one."""
    dtype = _dtype(device)
    attention, _ = choose_attention("auto", DENSE, device, dtype)
    plain = Circumstances(device=device, packed=True, attention=attention, compiler=compiler_obstacle(device))
    auto, _ = choose_mode("auto", plain)
    loop = auto_experts(grouped_obstacle([], device, dtype), device)[0] == "loop"
    others = {"all weights": replace(plain, whole=True), "mixtures": replace(plain, host_experts=loop)}
    obstacles = {"captured": capture_obstacle(plain), "compiled": compile_obstacle(plain), "eager": None}
    for name, obstacle in obstacles.items():
        why = MODES[name] + (TAKEN if name == auto else f"; auto takes {auto}")
        if name == "captured":
            told = ((of, capture_obstacle(about)) for of, about in others.items())
            why += "".join(f"; not of {of}: {against}" for of, against in told if against)
        yield Capability(f"step {name}", obstacle is None, f"{obstacle}; auto takes {auto}" if obstacle else why)


def _asked(name: str, check: Callable[[], None]) -> Capability:
    """A capability that a check refuses with the reason, or lets pass."""
    try:
        check()
    except InputError as refused:
        return Capability(name, False, str(refused).partition(": ")[2].partition("; set ")[0])
    return Capability(name, True, "bitsandbytes is installed")


def _dtype(device: Device) -> "torch.dtype":
    import torch

    dtype: torch.dtype = getattr(torch, compute_dtype(device))
    return dtype


def _bf16_reason(device: Device) -> str:
    if device.compute_capability is not None:
        sign = ">=" if device.bf16 else "<"
        return f"compute capability {device.capability} {sign} 8.0"
    return "the CPU has bf16 units" if device.bf16 else "this CPU shows no bf16 units, where float32 is faster"
