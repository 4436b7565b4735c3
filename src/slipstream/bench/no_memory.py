"""A card's out-of-memory error in a few words: how much was held when it came, and what was asked for beyond it.

PyTorch's own message is a paragraph with advice about its allocator; a table's cell has room for the two numbers.
"""

import re

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
HELD = r"Of the allocated memory ([\d.]+) ([KMGT]iB) is allocated by PyTorch"
MORE = r"Tried to allocate ([\d.]+) ([KMGT]iB)"


def out_of_memory(message: object) -> str:
    """``out of memory at 79.6 GB (0.52 GB more asked for)``; without numbers where the message has none."""
    held, more = (_gigabytes(pattern, str(message)) for pattern in (HELD, MORE))
    at = "" if held is None else f" at {held:.1f} GB"
    asked = "" if more is None else f" ({more:.2f} GB more asked for)"
    return f"out of memory{at}{asked}"


def _gigabytes(pattern: str, message: str) -> float | None:
    found = re.search(pattern, message)
    return None if found is None else float(found[1]) * UNITS[found[2]] / 1e9
