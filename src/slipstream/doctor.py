"""What this machine can do for Slipstream, and for what it cannot, the reason.

The report is made of plain values, so that the command line can print it as JSON, a bug report can carry it whole, and
``slipstream plan --device FILE`` can plan for this machine elsewhere. Capabilities are asked, not tried; running each
kernel once would prove more and take a minute. Only the ceilings of the device are measured, in a few seconds and once
(``device/ceilings.py``).
"""

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from slipstream.cost.hardware import (
    BF16_CAPABILITY,
    Device,
    available_memory,
    cgroup_limit,
    compute_dtype,
    cpu_has_bf16,
    describe,
    host_memory_limit,
    machine_memory,
)
from slipstream.device.driver import driver_version
from slipstream.versions import SLIPSTREAM, library_versions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

GIB = 1024**3


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
            "usable_bytes": host_memory_limit(),
        },
        "capabilities": [
            asdict(found) for found in capabilities(cards, host, no_cuda_reason(torch.version.cuda, driver))
        ],
        "ceilings": asdict(ceilings("cuda" if cards else "cpu", driver if cards else None, fresh=fresh)),
    }


def capabilities(cards: list[Device], host: Device, no_cuda: str) -> Iterator[Capability]:
    """What the device that would train (the first card, else the CPU) offers; ``no_cuda`` says why there is no card."""
    device = cards[0] if cards else host
    yield Capability("training on CUDA", bool(cards), device.name if cards else no_cuda)
    yield Capability("attention varlen", *_varlen(device))
    yield from _other_attention(device)
    yield Capability("attention sdpa", True, "works on every device; its mask grows with the square of the row length")
    yield Capability("bf16 compute", device.bf16, _bf16_reason(device))
    yield Capability("offloaded activations", *_offload(device))
    yield Capability("compiled step", *_compiled(device))
    yield Capability("captured step", *_card_only(device, "CUDA graphs: a step is replayed without launches"))
    yield Capability("NF4 weights and 8-bit optimizer", *_bitsandbytes(device))
    yield Capability(f"load.dtype auto takes {compute_dtype(device)}", True, _bf16_reason(device))


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


def _varlen(device: Device) -> tuple[bool, str]:
    if device.compute_capability is None:
        return False, "needs a CUDA card; sdpa is used"
    if device.compute_capability < BF16_CAPABILITY:
        return False, f"needs compute capability >= 8.0, this card has {_dotted(device)}; sdpa is used"
    return True, f"compute capability {_dotted(device)}; reads packed boundaries directly, without a mask"


def _other_attention(device: Device) -> Iterator[Capability]:
    """xFormers and FlexAttention, for a model of plain dot products."""
    import torch

    from slipstream.model.attention import KERNELS, WHAT, Needs

    plain, dtype = Needs(head_width=64, value_width=64), getattr(torch, compute_dtype(device))
    for name in ("xformers", "flex"):
        obstacle = KERNELS[name].obstacle(plain, device, dtype)
        yield Capability(f"attention {name}", obstacle is None, obstacle or WHAT[name])


def _card_only(device: Device, what: str) -> tuple[bool, str]:
    return (True, what) if device.kind == "cuda" else (False, "needs a CUDA card")


def _offload(device: Device) -> tuple[bool, str]:
    if device.kind == "cuda" and device.unified_memory:
        return False, f"{device.name} shares one memory with its host: moving activations frees nothing"
    return _card_only(device, "layer inputs wait in pinned host memory, reloaded before they are needed")


def _compiled(device: Device) -> tuple[bool, str]:
    if device.kind == "cuda" and find_spec("triton") is None:
        return False, "Triton is not installed, which writes the fused kernels; install a CUDA build of torch"
    return _card_only(device, "layers are compiled, elementwise kernels fused")


def _bitsandbytes(device: Device) -> tuple[bool, str]:
    if device.kind == "cuda" and find_spec("bitsandbytes") is None:
        return False, "bitsandbytes is not installed (pip install 'slipstream[nf4]')"
    return _card_only(device, "bitsandbytes is installed")


def _bf16_reason(device: Device) -> str:
    if device.compute_capability is not None:
        sign = ">=" if device.bf16 else "<"
        return f"compute capability {_dotted(device)} {sign} 8.0"
    return "the CPU has bf16 units" if device.bf16 else "this CPU shows no bf16 units, where float32 is faster"


def _dotted(device: Device) -> str:
    return "none" if device.compute_capability is None else "{}.{}".format(*device.compute_capability)
