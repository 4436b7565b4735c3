"""What the machine is: its device, its memory, and the dtype it computes in.

Every choice that depends on the hardware is made from a ``Device``, a plain description, so that it can be tested for
cards nobody has at hand; only ``describe`` asks torch. The price is that a property which a new choice needs must be
added here first. The alternative, asking ``torch.cuda`` wherever an answer is needed, is shorter and untestable.
"""

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from slipstream.errors import InputError

if TYPE_CHECKING:
    import torch

CPU_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names in /proc/cpuinfo of units that multiply bf16: AVX-512, AMX, and ARM's."""
BF16_CAPABILITY = (8, 0)
"""The first compute capability whose tensor cores multiply bf16 (Ampere)."""
UNIFIED_CAPABILITIES = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (11, 0), (12, 1)})
"""Architectures made only with memory shared with the host (Jetson from TX1 to Thor, DGX Spark's GB10), in case a
driver does not say so. Grace Hopper is none of them: its card has memory of its own."""


@dataclass(frozen=True)
class Device:
    """A device as the choices see it."""

    kind: str
    """``cuda`` or ``cpu``."""
    name: str
    """The product's name, as the driver or the processor tells it."""
    memory_bytes: int
    """The device's own memory; the machine's for a CPU, and for a card that shares it."""
    compute_capability: tuple[int, int] | None
    """CUDA's architecture number; none for a CPU."""
    bf16: bool
    """Whether it multiplies bf16 in hardware (emulation does not count)."""
    unified_memory: bool
    """Whether device and host share one memory, so that moving tensors to the host frees nothing."""

    @property
    def in_words(self) -> str:
        """What kind of device this is, for a sentence."""
        return "a CPU" if self.kind == "cpu" else f"on {self.kind}"

    @property
    def capability(self) -> str:
        """The compute capability as NVIDIA writes it: ``7.5``."""
        return "none" if self.compute_capability is None else "{}.{}".format(*self.compute_capability)


def describe(torch_device: "torch.device | str") -> Device:
    """Describe a torch device; ``InputError`` for a kind that Slipstream does not run on."""
    import torch

    device = torch.device(torch_device)
    if device.type == "cpu":
        return Device("cpu", cpu_name(), machine_memory(), None, cpu_has_bf16(), unified_memory=True)
    if device.type != "cuda":
        raise InputError(f"device {device}: Slipstream runs on cuda and cpu; use one of these")
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return Device(
        kind="cuda",
        name=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=capability,
        bf16=capability >= BF16_CAPABILITY,
        unified_memory=bool(properties.is_integrated) or capability in UNIFIED_CAPABILITIES,
    )


def compute_dtype(device: Device) -> str:
    """The dtype that ``load.dtype: auto`` takes: ``"bfloat16"`` where the hardware multiplies it, else ``"float32"``.

    Never ``"float16"``: its range needs loss scaling, and cards before Ampere gain little from it in training.
    """
    return "bfloat16" if device.bf16 else "float32"


def cpu_has_bf16(root: Path = Path("/")) -> bool:
    """Whether the processor multiplies bf16; false where the system does not tell (only Linux does)."""
    return not CPU_BF16_FLAGS.isdisjoint(_cpu_fields(root).get("flags", "").split())


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's product name, or its architecture where the system has no better one."""
    return _cpu_fields(root).get("model name") or platform.processor() or platform.machine()


def machine_memory() -> int:
    """Bytes of physical memory of the machine, whatever this process may use of it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes the kernel can give without swapping; all of the machine's where it does not tell."""
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return machine_memory()


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """The container's memory limit in bytes: the smallest of this process's groups, v1 or v2; none if unlimited."""
    limits = [int(text) for text in map(_read, _limit_files(root)) if text.strip().isdigit()]
    ceiling = min(limits, default=sys.maxsize)
    return None if ceiling >= machine_memory() else ceiling


def cgroup_room(root: Path = Path("/")) -> int | None:
    """Bytes this process's memory groups can still take, page cache that can be dropped counted as free; None if
    unlimited.
    """
    rooms = [
        int(limit) - max(0, int(usage) - _reclaimable(file.parent))
        for file in _limit_files(root)
        for limit, usage in [(_read(file).strip(), _read(file.with_name(_usage_name(file))).strip())]
        if limit.isdigit() and usage.isdigit() and int(limit) < machine_memory()
    ]
    return max(0, min(rooms)) if rooms else None


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes of host memory this process can still take: what is available, and the container's room if less."""
    room = cgroup_room(root)
    available = available_memory(root)
    return available if room is None else min(available, room)


def host_memory_limit(root: Path = Path("/")) -> int:
    """Bytes of host memory this process may count on: what is available, or the container's limit if smaller."""
    limit = cgroup_limit(root)
    available = available_memory(root)
    return available if limit is None else min(available, limit)


def free_bytes(torch_device: "torch.device | str") -> int:
    """Bytes that can still be allocated: on a card what it and PyTorch's allocator have free, else the host's."""
    import torch

    device = torch.device(torch_device)
    if device.type != "cuda":
        return host_memory_limit()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _limit_files(root: Path) -> Iterator[Path]:
    """The limit files of this process's memory group and of the groups above it (a parent's limit binds too).

    A container sees its own group as the root, so a path named in /proc may not exist; its parents then do.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        path = PurePosixPath(group)
        for ancestor in (path, *path.parents):
            yield base / ancestor.relative_to("/") / name


def _usage_name(limit_file: Path) -> str:
    """The file beside a group's limit that tells what it uses."""
    return "memory.current" if limit_file.name == "memory.max" else "memory.usage_in_bytes"


def _reclaimable(group: Path) -> int:
    """Bytes of a group's page cache that the kernel drops first."""
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.strip().isdigit():
            return int(value)
    return 0


def _cpu_fields(root: Path) -> dict[str, str]:
    """The first processor's fields in /proc/cpuinfo, with ARM's ``Features`` under x86's name ``flags``."""
    fields: dict[str, str] = {}
    for line in _read(root / "proc/cpuinfo").split("\n\n", 1)[0].splitlines():
        key, _, value = line.partition(":")
        key = key.strip()
        fields["flags" if key == "Features" else key] = value.strip()
    return fields


def _read(path: Path) -> str:
    """The file's text; empty where the system has no such file or keeps it to itself."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
