"""The records of a run: ``run.json``, ``steps.jsonl``, ``evals.jsonl``.

Why: everything the report, a resume and the user's own scripts want to know is plain JSON that is whole at any moment:
``run.json`` is replaced in one move, and the other two grow by whole lines. A step's loss is still on the device when
the step ends, so its line is written when the value has arrived (``train/scalars.py``). Trade-off: lines come some
steps late, in order, and a process killed outright loses the last few; ``drain`` waits for them, and belongs to
checkpoints, interrupts and the end. Alternative: a database file, which no text tool opens.
"""

import errno
import json
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from slipstream.errors import InputError
from slipstream.train.run_folder import FORMAT, RunFolder, space_for, write_atomically
from slipstream.train.scalars import ScalarRing

COUNTS = ("tokens", "learned_tokens", "documents", "padding_tokens")
"""The fields of a `StepRecord` that count."""
RUN_FIELDS = ("slipstream", "started", "outcome", "recipe", "versions", "device", "decisions", "data", "packing")
"""What a complete ``run.json`` of the current format holds, besides values that may be null."""

__all__ = [
    "EvalLog",
    "EvalRecord",
    "Records",
    "RunFolder",
    "StepLog",
    "StepRecord",
    "checked_run",
    "missing_steps",
    "read_records",
    "write_atomically",
]


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; one line of ``steps.jsonl``."""

    step: int
    """Counted from 1."""
    epoch: float
    """Passes over the data so far."""
    loss: float
    """Mean cross-entropy for each learned token, in nats; may be NaN or infinite."""
    grad_norm: float
    """Norm of the gradient before clipping; may be NaN or infinite."""
    learning_rate: float
    """The rate this step used."""
    tokens: int
    """Document tokens that went through the model, padding not counted."""
    learned_tokens: int
    """Of these, the tokens with a label."""
    documents: int
    """Documents in the step's batches."""
    padding_tokens: int
    """Padding that went through the model besides ``tokens``."""
    seconds: float
    """Wall-clock time since the previous step."""
    memory_bytes: int | None = None
    """Peak device memory so far; None where the device doesn't tell."""


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation; one line of ``evals.jsonl``."""

    step: int
    """Optimizer steps done before it; 0 is the untrained model."""
    loss: float
    """Mean cross-entropy for each learned token, in nats."""
    learned_tokens: int
    """Tokens the mean is over."""
    seconds: float
    """Wall-clock time."""


Record = TypeVar("Record", StepRecord, EvalRecord)


# ----------------------------------------------------------------------------------------------------------- the lines


def to_line(record: StepRecord | EvalRecord) -> str:
    """One JSON line. A NaN or infinite value is null there, its kind kept under ``nonfinite``."""
    values = asdict(record)
    odd = {name: str(value) for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    values.update(dict.fromkeys(odd))
    if odd:
        values["nonfinite"] = odd
    return json.dumps(values, allow_nan=False) + "\n"


def from_line(kind: type[Record], line: str) -> tuple[Record, list[str]]:
    """The record in a line, and the names of fields that the line lacks (NaN or 0 in the record).

    Unknown fields are passed over. ``ValueError`` where the line is no such record.
    """
    values = json.loads(line)
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise ValueError("no object with a step")
    odd = values.get("nonfinite")
    if isinstance(odd, dict):
        values.update({name: float(str(value)) for name, value in odd.items()})
    missing = [item.name for item in fields(kind) if item.name not in values and item.default is MISSING]
    values.update(dict.fromkeys(missing, 0))
    known: dict[str, Any] = {}
    for item in fields(kind):
        if item.name in values:
            known[item.name] = math.nan if item.name in missing and item.type is float else values[item.name]
            _check_number(item.name, known[item.name], optional=item.default is not MISSING)
    return kind(**known), missing


def _check_number(name: str, value: Any, *, optional: bool) -> None:
    if not (optional and value is None) and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{name} is {value!r}, not a number")


@dataclass(frozen=True)
class LineLog:
    """A file of JSON lines, appended whole lines at a time."""

    path: Path

    def append(self, record: StepRecord | EvalRecord) -> None:
        """Adds a line. ``InputError`` where no space is left; the file then ends with the line before."""
        data = to_line(record).encode()
        with space_for(self.path, len(data)), self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise

    def sync(self) -> None:
        """Waits until all lines are on the disk."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def cut_after(self, step: int) -> str | None:
        """Drops lines after ``step``, and unreadable ones, in one move. Returns the last line kept."""
        if not self.path.exists():
            return None
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        write_atomically(self.path, "".join(f"{line}\n" for line in kept))
        return kept[-1] if kept else None


def _step_of(line: str) -> float:
    try:
        return from_line(EvalRecord, line)[0].step
    except ValueError:
        return math.inf


@dataclass(frozen=True)
class EvalLog:
    """Writes ``evals.jsonl``."""

    path: Path

    def append(self, record: EvalRecord) -> None:
        """Adds an evaluation, and waits until it is on the disk; ``InputError`` where no space is left."""
        LineLog(self.path).append(record)
        LineLog(self.path).sync()

    def resume(self, step: int) -> None:
        """Drops evaluations after ``step``, the checkpoint's, which will be run again."""
        LineLog(self.path).cut_after(step)


class StepLog:
    """Writes ``steps.jsonl``, a line a step, in order, without making the host wait for the device."""

    def __init__(self, path: Path | None, ring: ScalarRing | None = None) -> None:
        """``path``: the file, or None to keep no lines; ``ring``: for the scalars of :meth:`push`, made at need."""
        self.on_record: Callable[[StepRecord], None] | None = None
        """Called with each record once its values have arrived."""
        self.last: StepRecord | None = None
        """The latest step whose values have arrived, for the progress bar."""
        self.waits = 0
        """How often ``push`` found the ring full and had to wait for the device."""
        self._lines = None if path is None else LineLog(path)
        self._ring = ring
        self._pending: deque[tuple[dict[str, Any], tuple[str, ...], int]] = deque()

    def push(self, step_fields: Mapping[str, float | None], scalars: Mapping[str, Tensor]) -> None:
        """Records a step: ``step_fields`` are what the host knows, ``scalars`` 0-d tensors; together a `StepRecord`.

        The tensors may be overwritten by later work on the same stream. ``InputError`` where no space is left.
        """
        values = {**step_fields, **dict.fromkeys(scalars, math.nan)}
        assert len(values) == len(step_fields) + len(scalars), "a value is given twice"
        StepRecord(**values)  # type: ignore[arg-type]  # a wrong name fails here, not some steps later
        if self._ring is None and any(scalar.is_cuda for scalar in scalars.values()):
            self._ring = ScalarRing(len(scalars))
        if self._ring is None:
            self._write({**values, **{name: float(scalar) for name, scalar in scalars.items()}})
            return
        self.poll()
        if self._ring.full:
            self.waits += 1
            self._finish_oldest()
        self._pending.append((values, tuple(scalars), self._ring.start(list(scalars.values()))))

    def poll(self) -> None:
        """Writes the lines whose values have arrived. Doesn't wait."""
        while self._pending and self._ring is not None and self._ring.arrived(self._pending[0][-1]):
            self._finish_oldest()

    def drain(self) -> None:
        """Waits for all values and writes their lines; for checkpoints, interrupts and the end only."""
        while self._pending:
            self._finish_oldest()

    def secure(self) -> None:
        """Waits for all values, and until their lines are on the disk: what a checkpoint counts as done stays done."""
        self.drain()
        if self._lines is not None:
            self._lines.sync()

    def resume(self, step: int) -> None:
        """Drops the lines after ``step``, the checkpoint's, whose steps will be run again."""
        assert not self._pending, "resume comes before the first push"
        line = self._lines.cut_after(step) if self._lines is not None else None
        self.last = from_line(StepRecord, line)[0] if line else None

    def _finish_oldest(self) -> None:
        assert self._ring is not None
        values, names, slot = self._pending.popleft()
        if not self._ring.arrived(slot):
            self._ring.wait(slot)
        self._write(values | dict(zip(names, self._ring.release(slot), strict=True)))

    def _write(self, values: dict[str, Any]) -> None:
        values.update({name: int(values[name]) for name in COUNTS})  # also where they came as device scalars
        self.last = StepRecord(**values)
        if self._lines is not None:
            self._lines.append(self.last)
        if self.on_record is not None:
            self.on_record(self.last)


# ------------------------------------------------------------------------------------------------------------ read back


@dataclass(frozen=True)
class Records:
    """What a run left behind, and what is wrong with it."""

    run: dict[str, Any]
    """``run.json``, as far as it is there."""
    steps: list[StepRecord] = field(default_factory=list)
    evals: list[EvalRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """One sentence for each thing that is missing or unreadable."""


def read_records(folder: Path) -> Records:
    """Reads a run's folder, passing over what cannot be read and saying so in ``problems``."""
    places, problems = RunFolder(Path(folder)), list[str]()
    run = _read_run(places, problems)
    steps = _read_lines(StepRecord, places.steps, problems)
    evals = _read_lines(EvalRecord, places.evals, problems) if places.evals.exists() else []
    return Records(run, steps, evals, problems)


def _read_run(folder: RunFolder, problems: list[str]) -> dict[str, Any]:
    try:
        run = folder.read_run()
    except InputError as error:
        problems.append(str(error))
        return {}
    problems += _run_problems(run, RUN_FIELDS)
    return run


def checked_run(folder: RunFolder, *needed: str) -> dict[str, Any]:
    """``run.json``; ``InputError`` where it is of another format, or lacks a value that is ``needed`` (``a.b``)."""
    run = folder.read_run()
    if problems := _run_problems(run, needed):
        raise InputError(
            f"'{folder.path}': {'; '.join(problems)}; use the version of Slipstream that wrote it "
            f"({run.get('slipstream', 'unknown')}), restore run.json, or start another run"
        )
    return run


def _run_problems(run: Mapping[str, Any], needed: Sequence[str]) -> list[str]:
    version = run.get("format")
    missing = [name for name in needed if not _holds(run, name)]
    problems = [f"run.json has format {version or 'unknown'}; this version reads format {FORMAT}"]
    return [*(problems if version != FORMAT else []), *([f"run.json lacks {', '.join(missing)}"] if missing else [])]


def _holds(run: Any, path: str) -> bool:
    """Whether there is a value at ``path``, its parts separated by dots."""
    for part in path.split("."):
        if not isinstance(run, Mapping) or part not in run:
            return False
        run = run[part]
    return True


def missing_steps(records: Records, made: int) -> list[int]:
    """The steps from 1 to ``made`` without a readable line."""
    return sorted(set(range(1, made + 1)) - {record.step for record in records.steps})


def _read_lines(kind: type[Record], path: Path, problems: list[str]) -> list[Record]:
    if not path.exists():
        problems.append(f"{path.name} is missing")
        return []
    records: list[Record] = []
    lacking: Counter[str] = Counter()
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record, missing = from_line(kind, line)
        except ValueError as error:
            cut = number == len(lines) and not text.endswith("\n")
            reason = "was cut off while it was written" if cut else f"cannot be read ({error})"
            problems.append(f"{path.name}: line {number:,} {reason}; it is left out")
            continue
        records.append(record)
        lacking.update(missing)
    problems.extend(f"{path.name}: {count:,} lines lack {name}" for name, count in lacking.items())
    return records
