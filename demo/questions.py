"""Questions and answers made at run time from the docstrings of Python's own standard library.

Nothing is downloaded and nothing is kept in the repository: whoever runs the demo has the text already. The answers of
one Python version differ a little from another's, so losses compare within a run, not between machines.

    1. names      public functions, classes and methods of modules that are safe to import
    2. pair       "What does `textwrap.dedent` do in Python?" → the docstring's first paragraph, cleaned
    3. held out   about one in ten, chosen by a hash of the answer: a function that several modules export under the
                  same text lies on one side only
"""

import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = """
abc argparse array ast asyncio base64 bisect bz2 calendar cmath codecs collections colorsys
concurrent.futures configparser contextlib copy csv dataclasses datetime decimal difflib dis email.message
enum filecmp fileinput fnmatch fractions functools gettext glob graphlib gzip hashlib heapq hmac html
http.client http.cookies inspect io ipaddress itertools json keyword linecache locale logging lzma mailbox
math mimetypes multiprocessing numbers operator os posixpath pathlib pickle pkgutil platform plistlib pprint
queue random re reprlib sched secrets selectors shelve shlex shutil signal smtplib socket socketserver
sqlite3 ssl stat statistics string struct subprocess symtable sys tarfile tempfile textwrap threading time
timeit token tokenize trace traceback types typing unicodedata unittest unittest.mock urllib.parse
urllib.request uuid warnings wave weakref xml.etree.ElementTree zipfile zlib
"""
HELD_OUT_ONE_IN = 10
EVALUATED = 48
"""Held-out pairs that are written down and evaluated: more would cost the demo time, and hardly move the mean."""
SHORTEST, LONGEST = 30, 600
"""Characters of an answer: shorter ones say nothing, longer ones cost the demo time."""
SIGNATURE = re.compile(r"^[\w.]+\(.*\)\s*(->.*)?$")


@dataclass(frozen=True)
class Pair:
    """One question with its answer, in the field names of the prompt/completion format."""

    prompt: str
    completion: str


def write_pairs(folder: Path) -> tuple[Path, Path]:
    """Write ``train.jsonl`` and ``heldout.jsonl`` into the folder; gives both paths."""
    train, held_out = split(pairs())
    return _write(folder / "train.jsonl", train), _write(folder / "heldout.jsonl", held_out)


def pairs(modules: Iterable[str] = ()) -> list[Pair]:
    """All pairs of the modules (none named: of ``MODULES``), by name, each answer once."""
    found: dict[str, Pair] = {}
    for name, thing in sorted(_documented(modules or MODULES.split()), key=lambda item: item[0]):
        answer = description(inspect.getdoc(thing) or "")
        if answer is not None:
            found.setdefault(answer, Pair(_question(name, thing), answer))
    return list(found.values())


def split(found: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs; the side depends on the answer alone, not on what else there is.

    No more than ``EVALUATED`` of the held-out ones are given, those of the smallest hashes, by name.
    """
    held_out = [pair for pair in found if _held_out(pair)]
    evaluated = set(sorted(held_out, key=_hash)[:EVALUATED])
    return [pair for pair in found if not _held_out(pair)], [pair for pair in held_out if pair in evaluated]


def description(docstring: str) -> str | None:
    """The docstring's first paragraph as one line, without a signature; none where it is no good answer."""
    answer = next(filter(None, map(_one_line, re.split(r"\n\s*\n", docstring))), "")
    return answer if SHORTEST <= len(answer) <= LONGEST and _is_prose(answer) else None


def _one_line(paragraph: str) -> str:
    lines = [line.strip() for line in paragraph.splitlines()]
    while lines and (not lines[0] or SIGNATURE.match(lines[0])):
        lines.pop(0)
    return " ".join(" ".join(lines).split())


def _is_prose(text: str) -> bool:
    return text[0].isupper() and text.endswith(".") and ">>>" not in text


def _held_out(pair: Pair) -> bool:
    return _hash(pair) % HELD_OUT_ONE_IN == 0


def _hash(pair: Pair) -> int:
    return int(hashlib.sha256(pair.completion.encode()).hexdigest(), 16)


def _question(name: str, thing: object) -> str:
    return f"What is `{name}` in Python?" if inspect.isclass(thing) else f"What does `{name}` do in Python?"


def _documented(modules: Iterable[str]) -> Iterator[tuple[str, object]]:
    """Public functions, classes and the classes' own public methods, by dotted name."""
    for module in _importable(modules):
        for name in sorted(getattr(module, "__all__", None) or vars(module)):
            thing = vars(module).get(name)
            if not name.startswith("_") and _documents_itself(module, name, thing):
                yield f"{module.__name__}.{name}", thing
                if inspect.isclass(thing):
                    yield from _methods(f"{module.__name__}.{name}", thing)


def _importable(modules: Iterable[str]) -> Iterator[ModuleType]:
    """The modules that this Python was built with (some builds lack sqlite3 or lzma)."""
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        yield module


def _documents_itself(module: ModuleType, name: str, thing: Any) -> bool:
    """Whether a name is a class or function of this module under its own name: no alias, nothing merely imported."""
    if not (inspect.isclass(thing) or inspect.isroutine(thing)) or thing.__name__ != name:
        return False
    origin = thing.__module__ or module.__name__
    return hasattr(module, "__all__") or origin.lstrip("_").split(".")[0] == module.__name__.split(".")[0]


def _methods(name: str, owner: type) -> Iterator[tuple[str, object]]:
    for method, value in vars(owner).items():
        if not method.startswith("_") and inspect.isroutine(value):
            yield f"{name}.{method}", value


def _write(path: Path, rows: list[Pair]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    return path
