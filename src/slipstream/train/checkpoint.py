"""Checkpoints that are whole or not there, and which of them a run goes on from.

    checkpoints/
      .saving/checkpoint-9/     being written; a crash leaves it here, where nothing looks for it
      checkpoint-6/             whole: moved here in one step, after its last file
        adapter_model.safetensors, optimizer.pt, scheduler.pt, rng_state.pth, trainer_state.json, ...
        slipstream.json         written last: step, and every file's size and SHA-256

Why: a process may be killed between any two writes, and a disk may give back other bytes than it got; going on from
half an optimizer trains something else and says nothing. Trade-off: a checkpoint is read once more for its digests when
it is saved (about a second a gigabyte on one core, several files at once) and when it is resumed. Alternative: trusting
names and sizes, which a power cut leaves in order around blocks of zeros. Where the list itself is gone, what the
files' own forms tell has to do: JSON that parses, archives whose checksums hold, weights that end where their header
says.
"""

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from slipstream.errors import InputError
from slipstream.train.run_folder import discard, write_atomically

NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth")
"""Files without which training can't go on exactly, besides the weights."""
WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")
"""One of these is there, whatever is trained."""
MANIFEST = "slipstream.json"
"""The list of a checkpoint's files. Checkpoints of transformers' own trainer have none."""
MANIFEST_FORMAT = 1


def last_checkpoint(folder: Path, tell: Callable[[str], None] = lambda _: None) -> Path:
    """The newest whole checkpoint in a run's ``checkpoints`` folder.

    ``tell`` gets a sentence for each newer one that is damaged. Raises ``InputError`` where none is whole.
    """
    reasons: list[str] = []
    for entry in _newest_first(folder):
        reason = damage(entry)
        if reason is None:
            return entry
        reasons.append(f"{entry.name} is damaged ({reason})")
        tell(f"{reasons[-1]}; passed over")
    raise InputError(
        f"'{folder}' holds no whole checkpoint to resume from: "
        f"{'; '.join(reasons) or 'the run was stopped before its first'}; "
        f"delete the run's folder or choose another output, and start again without --resume "
        f"(set train.save_every to save more often)"
    )


def checkpoint_until(folder: Path, step: int) -> Path | None:
    """The newest whole checkpoint saved after ``step`` or before; None where there is none."""
    return next((entry for entry in _newest_first(folder) if checkpoint_step(entry) <= step and is_whole(entry)), None)


def _newest_first(folder: Path) -> list[Path]:
    found = [entry for entry in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if checkpoint_step(entry) >= 0]
    return sorted((entry for entry in found if entry.is_dir()), key=checkpoint_step, reverse=True)


def checkpoint_step(folder: Path) -> int:
    """The step a checkpoint was saved after; -1 for a folder that isn't named like one."""
    step = folder.name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1


def is_whole(folder: Path) -> bool:
    """Whether training can go on from a checkpoint, exactly."""
    return checkpoint_step(folder) >= 0 and damage(folder) is None


def damage(folder: Path) -> str | None:
    """What keeps training from going on from a checkpoint, naming the file; None where it is whole."""
    if (folder / MANIFEST).exists():
        return _damage_by_manifest(folder)
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in WEIGHTS):
        missing.append(WEIGHTS[0])
    if missing:
        return f"{missing[0]} is missing"
    return next(filter(None, map(_damaged_form, _loaded(folder))), None)


def write_manifest(folder: Path) -> None:
    """Lists all files of a checkpoint in its ``slipstream.json``, as its last file."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = list(pool.map(_digest, paths))
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }
    manifest = {"format": MANIFEST_FORMAT, "step": checkpoint_step(folder), "files": files}
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def rotate(saved: Path, *, keep: int | None, best: Path | None) -> None:
    """Removes the oldest checkpoints beside ``saved``, so that ``keep`` stay (None or 0: all).

    Never removes ``saved``, which is whole, nor ``best``. Those of later steps go first: they are what an earlier
    attempt left, damaged or given up.
    """
    if not keep:
        return
    others = [entry for entry in saved.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if entry.is_dir() and entry != saved]
    others = [entry for entry in others if checkpoint_step(entry) >= 0]
    later = {entry for entry in others if checkpoint_step(entry) > checkpoint_step(saved)}
    removable = sorted(set(others) - {best}, key=lambda entry: (entry not in later, checkpoint_step(entry)))
    for entry in removable[: max(len(others) + 1 - keep, 0)]:
        discard(entry)


def _loaded(folder: Path) -> Iterator[Path]:
    """The files that training would load, those of all ranks and all shards."""
    yield from (folder / name for name in (*NEEDED, WEIGHTS[-1]) if (folder / name).is_file())
    yield from (path for pattern in ("rng_state_*.pth", "*.safetensors") for path in sorted(folder.glob(pattern)))


def _damaged_form(path: Path) -> str | None:
    """What is wrong with a file by its form alone; other weights in the same form can't be told from those saved."""
    try:
        if path.suffix == ".json":
            return _damaged_json(path)
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                return None
        with zipfile.ZipFile(path) as archive:
            return f"{path.name} holds other bytes than were saved" if archive.testzip() else None
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, SafetensorError) as error:
        return f"{path.name} cannot be read: {type(error).__name__}: {error}"


def _damaged_json(path: Path) -> str | None:
    tree = json.loads(path.read_text(encoding="utf-8"))
    needed = "global_step" if path.name == NEEDED[0] else "weight_map"
    if not isinstance(tree, dict) or needed not in tree:
        return f"{path.name} holds no {needed}"
    shards = sorted(set(tree["weight_map"].values())) if needed == "weight_map" else []
    return next((f"{name} is missing" for name in shards if not (path.parent / name).is_file()), None)


def _damage_by_manifest(folder: Path) -> str | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, step, entries = manifest["format"], manifest["step"], dict(manifest["files"])
        files = [_Listed(folder / name, int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries.items()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {type(error).__name__}: {error}"
    if version != MANIFEST_FORMAT:
        return f"{MANIFEST} has format {version!r}, and this version reads {MANIFEST_FORMAT}"
    if step != checkpoint_step(folder):
        return f"{MANIFEST} is of step {step!r}"
    if NEEDED[0] not in entries:
        return f"{MANIFEST} does not list {NEEDED[0]}"
    sizes = next(filter(None, map(_damaged_size, files)), None)
    if sizes is not None:
        return sizes  # found without reading gigabytes
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return next(filter(None, pool.map(_damaged_bytes, files)), None)


@dataclass(frozen=True)
class _Listed:
    """A file as the manifest has it."""

    path: Path
    size: int
    sha256: str


def _damaged_size(file: _Listed) -> str | None:
    try:
        size = file.path.stat().st_size
    except FileNotFoundError:
        return f"{file.path.name} is missing"
    return None if size == file.size else f"{file.path.name} has {size:,} bytes and should have {file.size:,}"


def _damaged_bytes(file: _Listed) -> str | None:
    try:
        same = _digest(file.path) == file.sha256
    except OSError as error:
        return f"{file.path.name} cannot be read: {error.strerror}"
    return None if same else f"{file.path.name} holds other bytes than were saved"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
