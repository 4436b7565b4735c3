"""What this machine can do for Slipstream, and for what it cannot, the reason.

The report is made of plain values, so that the command line can print it as JSON and a bug report can carry it whole.
It only looks: nothing is allocated on a device. The alternative, running each kernel once, would prove more and take
a minute.
"""

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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

GIB = 1024**3


@dataclass(frozen=True)
class Capability:
    """Something Slipstream can use here, or why it cannot."""

    name: str
    available: bool
    reason: str


def report() -> dict[str, Any]:
    """Examine this machine: devices, driver, versions, host memory (bytes), and capabilities with their reasons."""
    import torch

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
    }


def capabilities(cards: list[Device], host: Device, no_cuda: str) -> Iterator[Capability]:
    """What the device that would train (the first card, else the CPU) offers; ``no_cuda`` says why there is no card."""
    device = cards[0] if cards else host
    yield Capability("training on CUDA", bool(cards), device.name if cards else no_cuda)
    yield Capability("attention varlen", *_varlen(device))
    yield Capability("attention sdpa", True, "works on every device; its mask grows with the square of the row length")
    yield Capability("bf16 compute", device.bf16, _bf16_reason(device))
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
    console.print(offers)


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


def _bf16_reason(device: Device) -> str:
    if device.compute_capability is not None:
        sign = ">=" if device.bf16 else "<"
        return f"compute capability {_dotted(device)} {sign} 8.0"
    return "the CPU has bf16 units" if device.bf16 else "this CPU shows no bf16 units, where float32 is faster"


def _dotted(device: Device) -> str:
    return "none" if device.compute_capability is None else "{}.{}".format(*device.compute_capability)
