"""Which weights an adapter was trained on, and whether those at hand are the same.

Shapes and names don't tell: a folder may be swapped for another of the same shape, and the sum of an adapter and
weights that it never saw is noise. So a run records a fingerprint of its base: of each tensor in the checkpoint its
name, dtype, shape, and a few pieces of its bytes. Read from the files, it is the same on any device, in any dtype that
they are loaded in and with weights in four bits; written anew in other shards, the same weights have the same one.
Trade-off: a change that touches none of the pieces passes. Alternative: hashing all bytes, some ten seconds for 16 GB
at each start.

    model.safetensors      header | q_proj.weight ················ | k_proj.weight ········ |
    of each tensor                  ^^^^     ^^^^     ^^^^           ^^^^   ^^^^   ^^^^       start, middle, end
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from slipstream.errors import InputError
from slipstream.model.quantize import parameter_count

if TYPE_CHECKING:
    from torch import nn

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Where transformers looks for a model's weights, in its order."""
PIECE = 1024
"""Bytes of a piece."""
PIECES, PIECES_OF_FILE = 3, 4096
"""Pieces of a tensor; of a file whose tensors aren't known, a GGUF file for one."""


@dataclass(frozen=True)
class TrainedOn:
    """The base model that an adapter was trained on, as its run has recorded it."""

    names: tuple[str, ...]
    """Its hub id or path, the newest first: one that was moved has several."""
    parameters: int
    digest: str | None
    """Of its weights (``base_digest``); None where the run has none."""


def base_digest(name: str, revision: str | None = None) -> str | None:
    """The fingerprint of the checkpoint ``name`` (a folder, a GGUF file, a hub id that was loaded before).

    About a second for 18,000 tensors that were just read, 0.05 for the 300 of a dense model. None where the files of
    its weights have names of their own.
    """
    total = hashlib.sha256()
    if Path(name).is_file():
        return _finished(total, _whole_file(Path(name)))
    found = next(((file, path) for file in WEIGHTS if (path := _file(name, file, revision)) is not None), None)
    if found is None:
        return None
    listed = found[0].endswith(".json")
    files = sorted(set(json.loads(found[1].read_text("utf-8"))["weight_map"].values())) if listed else [found[0]]
    paths = [_file(name, file, revision) for file in files]
    return _finished(total, [line for path in paths if path is not None for line in _tensors(path)])


def check_named_base(adapter: Path, names: Collection[str]) -> None:
    """Raises ``InputError`` for an adapter that names another base model than its run, known as ``names``, had."""
    config = adapter / "adapter_config.json"
    named = _named_base(config)
    if named is None or _place(named) in map(_place, names):
        return
    raise InputError(
        f"adapter: {adapter} was trained on {named} by its adapter_config.json, and the run's base model is "
        f"{next(iter(names))}; put the run's own adapter back, or, where both are one model, set "
        f"base_model_name_or_path in {config} to the run's"
    )


def check_shape(base: "nn.Module", adapter: Path, parameters: int) -> None:
    """Raises ``InputError`` for a base model that has not ``parameters`` parameters, the adapter's aside."""
    has = sum(parameter_count(parameter) for parameter in base.parameters())
    if has != parameters:
        raise InputError(
            f"adapter: {adapter} was trained on a model of {parameters:,} parameters, and {base.name_or_path} has "
            f"{has:,}; use the base model it was trained on"
        )


def check_base(base: "nn.Module", adapter: Path, trained: TrainedOn, revision: str | None) -> str:
    """Raises ``InputError`` for a base model of another shape, or with other weights, than the adapter was trained on.

    Returns what is to be told where that can't be known; else nothing.
    """
    check_shape(base, adapter, trained.parameters)
    now = base_digest(str(base.name_or_path), revision)
    if trained.digest is None or now is None:
        return not_compared(str(base.name_or_path))
    if trained.digest != now:
        raise InputError(f"adapter: {adapter} was trained on {other_weights(trained.names[0], trained.digest, now)}")
    return ""


def other_weights(name: str, trained: str, now: str) -> str:
    """The end of a sentence about weights that are not those trained on."""
    return (
        f"{name} with the fingerprint {trained}, and the weights there now have {now}: another model of the same "
        "shape; put the weights it was trained on back (of a hub id: set load.revision to theirs), or train on these "
        "in another run"
    )


def not_compared(name: str) -> str:
    """What to tell where a run has no fingerprint of its base model."""
    return f"whether {name} still has the weights that the run was trained on can't be told: it recorded no fingerprint"


def _named_base(config: Path) -> str | None:
    """The base that an adapter names; whether the file is whole is for its loading to tell."""
    try:
        named = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return named if isinstance(named, str) and named else None


def _place(name: str) -> str:
    path = os.path.expanduser(name)
    return os.path.realpath(path) if os.path.exists(path) else name


def _file(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a model in its folder, or in the hub's cache; None where there is none."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, file, revision=revision)
    return Path(cached) if isinstance(cached, str) else None


def _finished(total: Any, lines: list[bytes]) -> str:
    for line in sorted(lines):
        total.update(len(line).to_bytes(8, "little") + line)
    digest: str = total.hexdigest()[:32]
    return digest


def _tensors(path: Path) -> list[bytes]:
    """One line for each tensor of a weight file, wherever in it they lie."""
    if path.suffix == ".safetensors":
        return list(_of_safetensors(path))
    if not zipfile.is_zipfile(path):  # a pickle of the oldest kind
        return _whole_file(path)
    with zipfile.ZipFile(path) as archive:  # the archive has a checksum of each tensor's storage
        return [
            f"{entry.filename.partition('/')[2]} {entry.file_size} {entry.CRC}".encode() for entry in archive.filelist
        ]


def _of_safetensors(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                about = json.dumps([name, tensor["dtype"], tensor["shape"]]).encode()
                yield about + hashlib.sha256(_pieces(file, 8 + size + start, end - start, PIECES)).digest()


def _whole_file(path: Path) -> list[bytes]:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        return [str(size).encode(), hashlib.sha256(_pieces(file, 0, size, PIECES_OF_FILE)).digest()]


def _pieces(file: BinaryIO, start: int, size: int, count: int) -> bytes:
    """``count`` pieces spread over ``size`` bytes from ``start``, its ends among them; all of a few."""
    if size <= count * PIECE:
        file.seek(start)
        return file.read(size)
    places = [start + (size - PIECE) * index // (count - 1) for index in range(count)]
    return b"".join(os.pread(file.fileno(), PIECE, place) for place in places)
