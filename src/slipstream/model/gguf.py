"""GGUF files: converted once to a safetensors folder, which then loads in seconds.

transformers reads GGUF by parsing its metadata in Python and dequantising every tensor, half a minute for the smallest
model and again at each start. Training needs plain weights anyway, so the file is converted once, under its digest, in
the dtype asked for. The price is disk space: a converted model has 2 or 4 bytes a parameter. The alternative, reading
the file at each start, needs none of it and makes every start, every resume and every look at the data slow.

    ~/.cache/slipstream/models/<digest of the file>/
      tokenizer/        the tokenizer alone: looking at data needs no weights
      config/           the configuration alone, from the header: planning needs no weights either
      float32/          a whole model folder: config, generation config, weights, tokenizer
      bfloat16/         the same in another dtype, only where asked for

A folder appears under its name when it is complete (written beside, then renamed), so an interrupted conversion leaves
nothing that a later start would take for a model.
"""

import hashlib
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import InputError
from slipstream.full_disk import FullDiskTold
from slipstream.permissions import as_umask_says
from slipstream.places import cache_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAGIC = b"GGUF"
SUFFIX = ".gguf"
MAKE_ROOM = "make room, or set XDG_CACHE_HOME to a folder on a larger disk"
DIGEST_CHARACTERS = 32


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file and the digest of its content, under which conversions are kept."""

    path: Path
    digest: str


def open_gguf(path: Path) -> GgufFile:
    """Check that a file is GGUF and take its digest; ``InputError`` where it is not one or cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
            if start != MAGIC:
                raise InputError(
                    f"model: {path} starts with {start!r}, a GGUF file with {MAGIC!r}; "
                    "give a hub id, a model folder, or a GGUF file"
                )
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"model: {path} cannot be read ({error.strerror}); check the file") from error
    return GgufFile(path, digest[:DIGEST_CHARACTERS])


def tokenizer_folder(file: GgufFile) -> Path:
    """The folder of the file's tokenizer, written at first use."""
    return _once(cache_folder("models") / file.digest / "tokenizer", lambda folder: _convert_tokenizer(file, folder))


def config_folder(file: GgufFile) -> Path:
    """The folder of the file's configuration, written at first use."""

    def convert(folder: Path) -> None:
        from transformers import AutoConfig

        with _reading(file):
            config = AutoConfig.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
        config.save_pretrained(folder)

    return _once(cache_folder("models") / file.digest / "config", convert)


def model_folder(file: GgufFile, dtype: str) -> Path:
    """The folder of the file's model in ``dtype`` (e.g. ``"float32"``), with its tokenizer, converted at first use."""

    def convert(folder: Path) -> None:
        shutil.copytree(tokenizer_folder(file), folder, dirs_exist_ok=True)
        _convert_model(file, dtype, folder)

    return _once(cache_folder("models") / file.digest / dtype, convert)


def _once(target: Path, write: Callable[[Path], None]) -> Path:
    """Fill ``target`` by ``write`` unless it is there: in a folder beside it, renamed when complete."""
    if target.is_dir():
        return target
    _make_cache(target.parent)
    with _space_errors(target), tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        built.mkdir()
        write(built)
        as_umask_says(built)
        _publish(built, target)
    return target


def _make_cache(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"model: the cache folder {folder} cannot be made ({error.strerror}); "
            "set XDG_CACHE_HOME to a folder that you can write to"
        ) from error


def _publish(built: Path, target: Path) -> None:
    try:
        built.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was first, with the same content
            raise


@contextmanager
def _space_errors(target: Path) -> Iterator[None]:
    """Tell a full or forbidden disk as the user's to mend."""
    try:
        with FullDiskTold(
            target.parent,
            lambda room: f"model: the converted model does not fit, and {target.parent} has {room}; {MAKE_ROOM}",
        ):
            yield
    except PermissionError as error:
        raise InputError(f"model: cannot write to {target.parent}; set XDG_CACHE_HOME to a folder you own") from error


def _convert_tokenizer(file: GgufFile, folder: Path) -> None:
    from transformers import AutoTokenizer

    with _reading(file):
        tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    tokenizer.save_pretrained(folder)


def _convert_model(file: GgufFile, dtype: str, folder: Path) -> None:
    model = _dequantised(file, dtype)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    if needed > (free := shutil.disk_usage(folder).free):
        raise InputError(
            f"model: the converted model takes {needed / 1e9:.2f} GB, and {folder.parent.parent} has "
            f"{free / 1e9:.2f} GB free; {MAKE_ROOM}"
        )
    model.save_pretrained(folder)


def _dequantised(file: GgufFile, dtype: str) -> "PreTrainedModel":
    """The file's model with plain weights, free of the reader's marks, which would forbid saving it.

    The weights are handed over, not copied, to a model built from the config alone; a tensor that the plain model has
    and the file lacks, or the other way round, is an error there.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    where: dict[str, Any] = {"gguf_file": file.path.name}
    with _reading(file):
        config = AutoConfig.from_pretrained(str(file.path.parent), **where)
        read, info = AutoModelForCausalLM.from_pretrained(
            str(file.path.parent),
            config=config,
            quantization_config=GgufConfig(dequantize=True),
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            **where,
        )
    if info["missing_keys"]:
        raise InputError(
            f"model: {file.path} lacks {len(info['missing_keys'])} of the model's tensors, e.g. "
            f"{min(info['missing_keys'])}; give a whole GGUF file (a split one must be merged first)"
        )
    with torch.device("meta"):
        plain: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    return plain


@contextmanager
def _reading(file: GgufFile) -> Iterator[None]:
    """What transformers and gguf raise on a damaged file or an architecture they do not know."""
    try:
        yield
    except (ValueError, KeyError, IndexError, NotImplementedError, struct.error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"model: {file.path} cannot be converted ({error}); "
            "check that the file is whole and its architecture one that transformers reads, or give a model folder"
        ) from error
