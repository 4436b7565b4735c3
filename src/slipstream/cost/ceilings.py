"""What a device can do at best, measured or from its data sheet: the rates that predictions divide by.

Measured rates (``device/ceilings.py``) are what ``doctor`` shows and ``plan`` uses here. For a device that is only
named, vendors' figures are scaled by what the one card measured so far reached of its own: 0.80 of the dense half-
precision peak, 0.89 of the memory bandwidth, 0.86 of the link's. Cards differ in that by some ten percent, and laptops
in their power limits by more, so a plan for a named device says where its rates come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from slipstream.cost.hardware import Device
from slipstream.errors import InputError

GIB = 2**30
MATMUL_SHARE, COPY_SHARE, LINK_SHARE = 0.80, 0.89, 0.86
"""Measured over data sheet on an H200: 794 of 989 TFLOP/s, 4.27 of 4.8 TB/s, 55.2 of 64 GB/s."""
PAGEABLE_SHARE = 0.32
"""Pageable over pinned copies to the device: 17.5 of 55.2 GB/s there."""
LAUNCH, SYNC = 10e-6, 15e-6
"""Seconds of one kernel launch from Python and of one wait for an idle device, where not measured: a common host."""


@dataclass(frozen=True)
class Ceilings:
    """A device's rates, in operations, bytes and seconds."""

    dtype: str
    """The dtype of ``matmul``."""
    matmul: float
    """Operations a second of a large matrix product."""
    copy: float
    """Bytes a second of a copy within device memory, read and written bytes counted."""
    to_device: float | None
    """Bytes a second from pinned host memory; None where host and device share one memory."""
    to_host: float | None
    pageable: float | None
    """Bytes a second to the device from pageable host memory."""
    launch: float
    """Seconds of the host for one kernel launched from Python."""
    sync: float
    """Seconds of one wait for an idle device."""
    source: str
    """Where the rates come from: ``measured`` or ``data sheet``."""


@dataclass(frozen=True)
class Sheet:
    """A device by its data sheet; rates are the vendor's, dense, with float32 accumulation."""

    name: str
    memory: float
    """GiB that the driver shows."""
    capability: tuple[int, int]
    half: float
    """Tera-operations a second in bfloat16, or in float32 where there are no units for it."""
    bandwidth: float
    """GB/s of its memory."""
    link: float
    """GB/s of its link to the host in one direction; 0 where they share one memory."""


SHEETS: Mapping[str, Sheet] = MappingProxyType(
    {
        "h200": Sheet("NVIDIA H200", 139.8, (9, 0), 989, 4800, 64),
        "h100": Sheet("NVIDIA H100 80GB HBM3", 79.2, (9, 0), 989, 3350, 64),
        "b200": Sheet("NVIDIA B200", 178.4, (10, 0), 2250, 8000, 64),
        "a100": Sheet("NVIDIA A100-SXM4-80GB", 79.2, (8, 0), 312, 2039, 32),
        "a100-40gb": Sheet("NVIDIA A100-SXM4-40GB", 39.4, (8, 0), 312, 1555, 32),
        "l40s": Sheet("NVIDIA L40S", 44.4, (8, 9), 362, 864, 32),
        "l4": Sheet("NVIDIA L4", 22.0, (8, 9), 121, 300, 32),
        "a10": Sheet("NVIDIA A10", 22.0, (8, 6), 125, 600, 32),
        "t4": Sheet("Tesla T4", 14.6, (7, 5), 8.1, 320, 16),
        "v100": Sheet("Tesla V100-SXM2-16GB", 15.8, (7, 0), 15.7, 900, 16),
        "rtx-5090": Sheet("NVIDIA GeForce RTX 5090", 31.4, (12, 0), 209.5, 1792, 64),
        "rtx-4090": Sheet("NVIDIA GeForce RTX 4090", 23.6, (8, 9), 165, 1008, 32),
        "rtx-3090": Sheet("NVIDIA GeForce RTX 3090", 23.6, (8, 6), 71, 936, 32),
        "rtx-5090-laptop": Sheet("NVIDIA GeForce RTX 5090 Laptop GPU", 23.4, (12, 0), 105, 896, 32),
        "rtx-4090-laptop": Sheet("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, (8, 9), 79, 576, 32),
        "rtx-4060-laptop": Sheet("NVIDIA GeForce RTX 4060 Laptop GPU", 7.8, (8, 9), 29, 256, 16),
        "rtx-3060-laptop": Sheet("NVIDIA GeForce RTX 3060 Laptop GPU", 5.8, (8, 6), 21, 336, 16),
        "rtx-2070-laptop": Sheet("NVIDIA GeForce RTX 2070 Laptop GPU", 7.8, (7, 5), 6.6, 448, 16),
        "dgx-spark": Sheet("NVIDIA GB10", 119.7, (12, 1), 125, 273, 0),
    }
)
"""Devices by the name that ``--device`` takes. Laptops at about their highest power limit."""


def named_device(name: str) -> tuple[Device, Ceilings]:
    """A device by its short name, and its rates by data sheet. Raises ``InputError`` for a name not listed."""
    key = name.lower().replace(" ", "-").replace("_", "-")
    if key not in SHEETS:
        near = get_close_matches(key, SHEETS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"--device {name!r} is no known device; {hint}there is {', '.join(SHEETS)}, "
            "or give a file that 'slipstream doctor --json' wrote on that machine"
        )
    sheet = SHEETS[key]
    bf16 = sheet.capability >= (8, 0)
    device = Device("cuda", sheet.name, round(sheet.memory * GIB), sheet.capability, bf16, sheet.link == 0)
    link = sheet.link * 1e9 * LINK_SHARE or None
    return device, Ceilings(
        dtype="bfloat16" if bf16 else "float32",
        matmul=sheet.half * 1e12 * MATMUL_SHARE,
        copy=sheet.bandwidth * 1e9 * COPY_SHARE,
        to_device=link,
        to_host=link,
        pageable=link and link * PAGEABLE_SHARE,
        launch=LAUNCH,
        sync=SYNC,
        source="data sheet",
    )
