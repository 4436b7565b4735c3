"""Pages of documentation that a script writes: one command for all of them, and their tables.

A page that is generated can be checked: the same script run with ``--check`` writes nothing and fails where the page
is not what it would write. The price is this module in the package, beside the scripts of ``docs/`` and
``benchmarks/`` that use it; two scripts' folders share no other place that both can import from.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def page_command(
    about: str, target: Path, script: str, write: Callable[[], str], arguments: Sequence[str] | None
) -> int:
    """Write ``target``, or with ``--check`` compare it; gives the exit code: 0, or 1 where the page is out of date.

    ``about``: the script's docstring, for its help. ``script``: how the script is called, for the message.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not up to date")
    check = parser.parse_args(arguments).check
    text = write()
    if not check:
        target.write_text(text, encoding="utf-8")
        return 0
    if target.exists() and target.read_text(encoding="utf-8") == text:
        return 0
    print(f"{target.parent.name}/{target.name} is not what {script} writes; run it", file=sys.stderr)
    return 1


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"
