"""A run's folder: its places, and writes that are whole or don't happen.

Why: a run is interrupted, a disk fills up, an output is named twice; none of that may cost what an earlier run or an
earlier moment left. Files and folders are written under a hidden name and moved into place: a folder fills up in
``.saving/``, what it replaces goes over ``.replaced/``, what is deleted over ``.removing/``. Trade-off: a second copy
for a moment, and a wait for the disk. Alternative: writing in place, which a crash leaves in halves.
"""

import contextlib
import errno
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from slipstream.errors import InputError
from slipstream.full_disk import FullDiskTold
from slipstream.permissions import as_umask_says

FORMAT = 1
"""Version of the run folder's format, ``run.json``'s ``format``."""
SAVING, REPLACED, REMOVING = ".saving", ".replaced", ".removing"
"""Folders beside a folder that is being written, replaced or deleted."""


LOCK = ".lock"
"""The file whose lock a running training holds."""
SEEN_WITHIN = 10.0
"""Seconds after which what one machine has written counts as unseen by another: some file servers show it late."""


@dataclass(frozen=True)
class RunFolder:
    """The places in a run's folder. Making one touches no disk; ``create`` and ``open`` check."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> "RunFolder":
        """Makes a new run's empty folder. ``InputError`` where anything is there already: nothing is overwritten."""
        folder = cls(Path(path))
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            if not folder.run_json.exists():
                folder._remove_temporary_files()
            found = sorted(entry.name for entry in folder.path.iterdir() if entry.name != LOCK)
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError(f"output '{path}' cannot be made a folder ({reason}); choose another output") from error
        if folder.run_json.exists():
            also = ", or add --resume" if folder._goes_on() else ""
            raise InputError(f"output '{path}' holds another run{folder._age()}; choose another output{also}")
        if found:
            more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
            raise InputError(f"output '{path}' is not empty ('{found[0]}'{more}); choose another output, or empty it")
        return folder

    @classmethod
    @contextlib.contextmanager
    def claimed(cls, path: Path, *, resume: bool) -> Iterator["RunFolder"]:
        """``create``, or with ``resume`` ``open``, and no other process may write there inside the context.

        ``InputError`` where one does already. The lock ends with the process, however that ends.
        """
        folder = cls.open(path, resume=True) if resume else cls(Path(path))
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            handle = (folder.path / LOCK).open("a")
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError(f"output '{path}' cannot be written ({reason}); choose another output") from error
        with handle:
            _lock(handle, folder.path)
            try:
                yield folder if resume else cls.create(path)
            finally:
                (folder.path / LOCK).unlink(missing_ok=True)

    @classmethod
    def open(cls, path: Path, *, resume: bool = False) -> "RunFolder":
        """The folder of a run that was started before; ``InputError`` where there is none, with what is there instead
        or, for one that was to be resumed, how to start.
        """
        folder = cls(Path(path))
        if not folder.path.is_dir():
            raise InputError(f"'{path}' is not a folder; give the output folder of a run")
        if not folder.run_json.is_file():
            again = "one that was stopped before it began to train starts again without --resume"
            raise InputError(
                f"'{path}' is not a run (it has no run.json); give the output folder of a run; "
                f"{again if resume else folder._held()}"
            )
        return folder

    @contextlib.contextmanager
    def token(self) -> Iterator[str]:
        """The name of an empty file that is there inside the context, and in no other folder, since it is random."""
        file = self.path / f"{LOCK}.{uuid4().hex}.tmp"
        file.touch(exist_ok=False)
        try:
            yield file.name
        finally:
            file.unlink(missing_ok=True)

    def holds(self, token: str) -> bool:
        """Whether another process's ``token`` is there, by ``SEEN_WITHIN`` at the latest."""
        until = time.monotonic() + SEEN_WITHIN
        while not (seen := os.path.exists(self.path / token)) and time.monotonic() < until:
            time.sleep(0.1)
        return seen

    @property
    def run_json(self) -> Path:
        """What was run, and how it ended."""
        return self.path / "run.json"

    @property
    def steps(self) -> Path:
        """One JSON line a step."""
        return self.path / "steps.jsonl"

    @property
    def evals(self) -> Path:
        """One JSON line an evaluation."""
        return self.path / "evals.jsonl"

    @property
    def checkpoints(self) -> Path:
        """``checkpoint-<step>`` folders."""
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        """The trained adapter."""
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        """The trained model, after full fine-tuning."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        """The report."""
        return self.path / "report.html"

    def read_run(self) -> dict[str, Any]:
        """``run.json``; ``InputError`` where it cannot be read."""
        try:
            run = json.loads(self.run_json.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"'{self.run_json}' cannot be read ({error}); restore it, or start another run") from error
        if not isinstance(run, dict):
            raise InputError(f"'{self.run_json}' holds no object; restore it, or start another run")
        return run

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Replaces ``run.json`` in one move. NaN and infinities become null, their places listed in ``nonfinite``."""
        places: list[str] = []
        clean = _finite(dict(run), "", places)
        if places:
            clean["nonfinite"] = places
        write_atomically(self.run_json, json.dumps(clean, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def write_report(self, page: str) -> None:
        """Replaces ``report.html`` in one move; ``InputError`` where the folder may only be read."""
        try:
            write_atomically(self.report, page)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise InputError(
                f"'{self.report}' cannot be written ({error.strerror}); make '{self.path}' writable to you, or copy "
                "the run to where you may write, and make the report of the copy"
            ) from error

    def _held(self) -> str:
        """What is in a folder that is no run's."""
        if (self.path / "adapter_config.json").is_file():
            return "this one holds an adapter, which a run has below its own folder"
        if (self.path / "config.json").is_file():
            return "this one holds a model"
        found = sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith("."))
        if not found:
            return "this one is empty, as a run leaves it that was stopped before its first checkpoint"
        return f"this one holds '{found[0]}'"

    def clean(self) -> None:
        """Puts right what a killed process left between two moves: half-written and half-deleted files and folders."""
        self._remove_temporary_files()
        for place in (self.path, self.checkpoints):
            _clean(place)

    def _remove_temporary_files(self) -> None:
        files = (self.run_json, self.steps, self.evals, self.report)
        for name in (LOCK, *(f".{file.name}" for file in files)):
            for temporary in self.path.glob(f"{name}.*.tmp"):
                temporary.unlink(missing_ok=True)

    def _goes_on(self) -> bool:
        """Whether ``--resume`` may help: not without a checkpoint, and what diverged would diverge again."""
        try:
            diverged = self.read_run().get("outcome") == "diverged"
        except InputError:
            return False
        return not diverged and any(self.checkpoints.glob("checkpoint-*"))

    def _age(self) -> str:
        try:
            run = self.read_run()
        except InputError:
            return ""
        return f" (started {run.get('started', 'at an unknown time')}, {run.get('outcome', 'outcome unknown')})"


def _lock(handle: IO[str], folder: Path) -> None:
    if sys.platform == "win32":  # no advisory locks there: two runs in one folder are not told apart
        return
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise InputError(
            f"output '{folder}' is being written by another process; wait for it, or choose another output"
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text`` in one move: a reader, or a crash, sees the old contents or the new, never a part.

    ``InputError`` where no space is left; the old contents stay.
    """
    data = text.encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with space_for(path, len(data)):
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


# ---------------------------------------------------------------------------------------------------- whole folders


def staging_for(target: Path) -> Path:
    """Where to write a folder that :func:`publish` moves to ``target``; nothing is there yet but its parent."""
    staged = target.parent / SAVING / target.name
    _clean(target.parent)
    staged.parent.mkdir(parents=True)
    return staged


def publish(target: Path) -> None:
    """Moves what was written to ``staging_for(target)`` to ``target``, once it is on the disk.

    A crash leaves the old ``target`` or the new; between two moves the old one is in ``.replaced/``, whence
    ``RunFolder.clean`` takes it back.
    """
    staged = target.parent / SAVING / target.name
    as_umask_says(staged)
    for entry in staged.rglob("*"):
        _sync(entry)
    _sync(staged)
    if target.exists():
        _move(target, REPLACED)
    os.rename(staged, target)
    _sync(target.parent)
    for leftover in (SAVING, REPLACED):
        shutil.rmtree(target.parent / leftover, ignore_errors=True)


def discard(folder: Path) -> None:
    """Deletes a folder; a crash leaves it whole, or none of it under its name."""
    shutil.rmtree(_move(folder, REMOVING).parent)


def _move(folder: Path, where: str) -> Path:
    place = folder.parent / where
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    return folder.rename(place / folder.name)


def _clean(place: Path) -> None:
    for old in (place / REPLACED).glob("*"):
        if not (place / old.name).exists():
            old.rename(place / old.name)
    for leftover in (SAVING, REPLACED, REMOVING):
        shutil.rmtree(place / leftover, ignore_errors=True)


def _sync(path: Path) -> None:
    """Waits until a file's or folder's contents are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def full_disk_told(path: Path) -> FullDiskTold:
    """Makes a full disk, a used-up quota and too large a file the user's ``InputError``, however a library tells it."""
    return FullDiskTold(
        path,
        lambda room: (
            f"no space left in '{path}' ({room}): what was being saved is not there, everything before it is whole; "
            "free some space and go on with --resume, or choose another output"
        ),
    )


def space_for(path: Path, need: int) -> FullDiskTold:
    """Makes a full disk (or quota, or too large a file), met while ``need`` bytes go to ``path``, an ``InputError``."""
    return FullDiskTold(
        path.parent,
        lambda room: (
            f"no space left for '{path}': {need:,} bytes needed, {room}; free some space, or choose another output"
        ),
    )


def _finite(value: Any, place: str, places: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item, f"{place}.{key}".lstrip("."), places) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, f"{place}.{index}", places) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        places.append(place)
        return None
    return value
