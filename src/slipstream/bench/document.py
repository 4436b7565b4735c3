"""Results as documents: what was measured, on what, by which command, at which commit.

A number without these can't be compared with another. The commit is asked of git where the package lies in a
checkout; ``SLIPSTREAM_COMMIT`` names it for a copy without history, such as one sent to another machine.
"""

import csv
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.cost.hardware import describe
from slipstream.errors import InputError
from slipstream.versions import SLIPSTREAM, library_versions

PATH_OPTIONS = ("--out", "--csv")


def document(benchmark: str, device: torch.device, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The result document of a benchmark, ready for JSON; ``rows`` may still grow."""
    return {
        "benchmark": benchmark,
        "device": describe(device).name,
        "versions": {"python": platform.python_version(), "slipstream": SLIPSTREAM, **library_versions()},
        "cuda": torch.version.cuda,
        "command": command_line(sys.argv),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **more,
        "rows": rows,
    }


def command_line(words: Sequence[str]) -> str:
    """The command that was given, without the machine's paths: its own name, and no option that names a file."""
    kept: list[str] = []
    skip = False
    for word in words[1:]:
        if not skip and not word.startswith(tuple(f"{name}=" for name in PATH_OPTIONS)) and word not in PATH_OPTIONS:
            kept.append(word)
        skip = word in PATH_OPTIONS
    return shlex.join(["slipstream", *kept])


def commit() -> str:
    """The commit of this code, or ``unknown``."""
    if told := os.environ.get("SLIPSTREAM_COMMIT"):
        return told
    folder = Path(__file__).parent
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git here
        return "unknown"
    return found.stdout.strip() or "unknown"


def check_writable(path: Path) -> None:
    """``InputError`` where ``path`` can't become a file: told before an hour of measuring, not after."""
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"{path}: not a file in an existing folder; make the folder or name another file")


def append_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append flat rows to a CSV file, with a header if it is new. Raises ``InputError`` for other columns in it."""
    if not rows:
        return
    columns = list(rows[0])
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        with path.open(newline="", encoding="utf-8") as file:
            found = next(csv.reader(file))
        if found != columns:
            raise InputError(f"{path} has columns {found[:4]} ..., these results {columns[:4]} ...; name another file")
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(rows)
