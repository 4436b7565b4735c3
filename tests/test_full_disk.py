"""A full disk is told alike, whoever says it and whatever limit it was."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import SafetensorError
from safetensors.torch import save_file

from slipstream.errors import InputError
from slipstream.full_disk import full_disk, room_in
from slipstream.model.merge import written_whole
from slipstream.report.html import remake_report
from slipstream.train.run_folder import full_disk_told, write_atomically
from tiny import tiny_model, tiny_tokenizer

MOST = 4096


@pytest.fixture
def small_files() -> Iterator[None]:
    """As under ``ulimit -f``: no file may have more than 4,096 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), errno.EFBIG),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), errno.EDQUOT),
        (Exception("File too large (os error 27)"), errno.EFBIG),  # tokenizers'
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), errno.ENOSPC),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"), errno.ENOSPC),
        (OSError(errno.EIO, "No space left"), None),
        (Exception("os error 272"), None),
        (InputError("no space (os error 28)"), None),
    ],
)
def test_what_a_full_disk_is(error: Exception, number: int | None) -> None:
    assert full_disk(error) == number


def test_limits_are_told_apart(tmp_path: Path, small_files: None) -> None:
    assert room_in(tmp_path / "not" / "yet", errno.ENOSPC).endswith("free")
    assert room_in(tmp_path, errno.EDQUOT).endswith("free, but a quota is used up")
    assert room_in(tmp_path, errno.EFBIG).endswith(
        "no file may have more than 4,096 bytes: raise that limit (ulimit -f)"
    )


def test_a_tokenizer_too_large_for_a_checkpoint(tmp_path: Path, small_files: None) -> None:
    with (
        pytest.raises(InputError, match=r"no space left in .*4,096 bytes.*ulimit -f.* is whole"),
        full_disk_told(tmp_path),
    ):
        tiny_tokenizer().save_pretrained(tmp_path)


def test_weights_too_large_for_a_merged_model(tmp_path: Path, small_files: None) -> None:
    with (
        pytest.raises(InputError, match=r"no space left for .*4,096 bytes.*ulimit -f"),
        written_whole(tmp_path / "out") as made,
    ):
        save_file(dict(tiny_model().lm_head.named_parameters()), made / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_report_too_large(tmp_path: Path, small_files: None) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "report.html").write_text("before")
    with pytest.raises(InputError, match=r"no space left for .*report.html.*4,096 bytes.*ulimit -f"):
        remake_report(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"run.json": "{}", "report.html": "before"}


def test_a_small_file_is_written_beside_the_limit(tmp_path: Path, small_files: None) -> None:
    write_atomically(tmp_path / "run.json", "x" * MOST)
    assert (tmp_path / "run.json").stat().st_size == MOST
