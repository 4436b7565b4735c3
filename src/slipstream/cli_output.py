"""What all commands share: where their output goes, and how they import.

With ``--json`` standard output carries one JSON document and nothing else: what libraries print, down to the file
descriptor, is sent to standard error meanwhile.
"""

import gc
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

EXIT_READER_GONE = 141
"""Whoever read standard output has closed it (``slipstream data ... | head -1``): 128 + SIGPIPE, what a shell shows for
``cat``, ``grep`` and ``git``, which that signal ends without a word. 0 would tell a script that all was written, and 1
that there was a fault. The signal itself stays ignored, as Python has it: it would end a training run whose connection
to a tracker breaks."""

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, the rest on stderr.")]


@contextmanager
def importing() -> Iterator[None]:
    """A context for imports, without garbage collection: they make a million objects that stay, and looking through
    them again and again takes a fifth of the start. None of them is looked at later, either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_without_reader() -> NoReturn:
    """Exit without a word; else the interpreter's own flush at exit would complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(EXIT_READER_GONE)


def console(*, stderr: bool) -> "Console":
    """A console that prints text as it is: brackets in a user's data are no markup, ``:id:`` is no emoji."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            leave_without_reader()

    return Output(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def speaks() -> bool:
    """Whether this process is the one of several that prints, as the launcher numbers them."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def output(as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Give the command an ``emit`` for its result, which ends on standard output as JSON if that was asked for.

    A command that raises emits nothing.
    """
    results: list[dict[str, Any]] = []
    with _stdout_on_stderr() if as_json else nullcontext():
        yield results.append
    if as_json and speaks():
        (result,) = results
        print(json.dumps(_finite(result), allow_nan=False, indent=2), flush=True)


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send what anyone prints to standard error: Python's prints, and those of libraries and worker processes."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as null, since JSON has no spelling for them (a loss can be one)."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
