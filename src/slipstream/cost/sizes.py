"""Bytes in words, the same in decisions, plans and reports: in the unit in which a number has digits to show.

The alternative, gibibytes everywhere, lines up better and says "0.0 GiB" of what is a few mebibytes.
"""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size_text(value: float) -> str:
    """E.g. ``43.1 GiB``, ``512 B``. ``value``: bytes, not below 0."""
    power = min(max(0, int(value).bit_length() - 1) // 10, len(UNITS) - 1)
    if power + 1 < len(UNITS) and round(value / 1024**power, 1 if power else 0) >= 1024:
        power += 1
    return f"{value / 1024**power:.{1 if power else 0}f} {UNITS[power]}"
