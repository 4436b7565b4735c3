"""Values and keys of results in words, for the page: the key's ending gives the unit."""

import math
import re
from typing import Any

from slipstream.bench.no_memory import out_of_memory

MIXED = ("_seconds", "_bytes", "_ms", "_mb", "_gb")
HEADINGS = {
    "queries": "host asks the device",
    "syncs": "host waits for the device",
    "distance": "distance from the first arm",
    "boundaries": "boundaries made, a step",
    "buffers": "reload buffers",
    "ran": "mode that ran",
    "update": "optimizer",
    "whole": "whole step",
    "c": "one reload (c)",
    "g": "one layer's backward (g)",
    "input": "one layer input",
    "link out": "link, out",
    "share of floor": "matrix products' share of the step",
    "floor": "matrix products alone (floor)",
    "parameters": "weights that multiply",
}
"""What a key is called on the page, where its own words would not be understood."""


def heading(key: str) -> str:
    """A key as a heading, without the part that tells its unit."""
    return HEADINGS.get(plain(key), plain(key))


def plain(key: str) -> str:
    """A key's own words without its unit."""
    for unit in MIXED:
        key = key.replace(f"{unit}_", "_").removesuffix(unit)
    return key.removeprefix("seconds_").replace("_", " ")


def percent(share: float, digits: int = 1) -> str:
    """A signed percentage; without a sign where it is rounded to 0, without decimals from 100% on."""
    text = f"{share:+.{0 if abs(share) >= 1 else digits}%}"
    return text if re.search("[1-9]", text) else text.lstrip("+-")


def seconds(value: float | None) -> str:
    """E.g. ``9.50 ms``, ``1233 ms``, ``12.3 s``."""
    if value is None:
        return "–"
    value *= 1e3
    if abs(value) >= 9_999.5:
        return f"{value / 1e3:.1f} s"
    text = f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
    return f"{text if re.search('[1-9]', text) else text.lstrip('-')} ms"


def scalar(key: str, value: Any) -> str:
    """A value with the unit that its key tells."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return out_of_memory(value) if "Tried to allocate" in value else value
    if (unit := _with_unit(key, value)) is not None:
        return unit
    if key in ("share", "fill", "share_of_floor"):
        return f"{math.floor(value * 1e4) / 100:.2f}%" if 0.999 < value < 1 else f"{value:.1%}"
    if "gain" in key.split("_"):
        return percent(value)
    if "ratio" in key.split("_"):
        return f"{value:.3f}" if value < 2 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _with_unit(key: str, value: float) -> str | None:
    parts = key.split("_")
    if "per" in parts:
        return None
    if "seconds" in parts or key in ("c", "g") or (parts[0] == "saved" and abs(value) < 60):
        return seconds(value)
    if "ms" in parts:
        return seconds(value / 1e3)
    if "bytes" in parts:
        return f"{value / 1e9:.2f} GB"
    if "gb" in parts:
        return f"{value:.2f} GB"
    return f"{value:,} MB" if "mb" in parts else None
