"""The fingerprint of a base model: the same for the same weights however they are stored, another for others."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from slipstream.errors import InputError
from slipstream.model.base_weights import PIECE, base_digest, check_named_base
from tiny import tiny_model


def saved(folder: Path, seed: int = 0, **how: Any) -> str:
    torch.manual_seed(seed)
    tiny_model().save_pretrained(folder, **how)
    return str(folder)


def test_it_is_of_the_weights_and_not_of_their_files(tmp_path: Path) -> None:
    whole = base_digest(saved(tmp_path / "whole"))
    assert whole is not None
    assert base_digest(saved(tmp_path / "shards", max_shard_size="40KB")) == whole
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert base_digest(saved(tmp_path / "other", seed=1)) not in (whole, None)
    shutil.copytree(tmp_path / "whole", tmp_path / "moved")
    assert base_digest(str(tmp_path / "moved")) == whole


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.input_layernorm.weight"])
def test_one_tensor_that_differs_is_seen(tmp_path: Path, name: str) -> None:
    """A large one, of which there are pieces, and one that is taken whole."""
    before = base_digest(saved(tmp_path))
    torch.manual_seed(0)
    model = tiny_model()
    tensor = model.get_parameter(name)
    assert (tensor.nbytes > 3 * PIECE) == (name == "lm_head.weight")
    with torch.no_grad():
        tensor.mul_(1.001)
    model.save_pretrained(tmp_path)
    assert base_digest(str(tmp_path)) != before


def binary(folder: Path, seed: int, zipped: bool) -> str:
    torch.manual_seed(seed)
    folder.mkdir()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    return str(folder)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_have_one_too(tmp_path: Path, zipped: bool) -> None:
    first, other = binary(tmp_path / "first", 0, zipped), binary(tmp_path / "other", 1, zipped)
    shutil.copytree(first, tmp_path / "copy")
    assert base_digest(first) == base_digest(str(tmp_path / "copy")) != base_digest(other)
    assert None not in (base_digest(first), base_digest(other))


def test_a_single_file_has_one_too(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(bytes(range(256)) * 64)
    before = base_digest(str(file))
    file.write_bytes(bytes(range(256)) * 63 + bytes(256))
    assert before != base_digest(str(file)) is not None


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The hub's cache, with two revisions of one model."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--owner--name"
    for seed, (branch, commit) in enumerate((("main", "a" * 40), ("old", "b" * 40))):
        saved(kept / "snapshots" / commit, seed)
        (kept / "refs").mkdir(exist_ok=True)
        (kept / "refs" / branch).write_text(commit)
    return kept


def test_a_model_of_the_hub_has_that_of_its_revision(hub: Path) -> None:
    main, old = base_digest("owner/name"), base_digest("owner/name", "old")
    assert main == base_digest(str(hub / "snapshots" / ("a" * 40)))
    assert old == base_digest(str(hub / "snapshots" / ("b" * 40))) != main


def test_without_weights_of_a_known_name_there_is_none(tmp_path: Path) -> None:
    assert base_digest(str(tmp_path)) is None


def test_an_adapter_that_names_another_base_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    (tmp_path / "base").mkdir()
    (tmp_path / "link").symlink_to("base")
    config.write_text(f'{{"base_model_name_or_path": "{tmp_path / "link"}"}}')
    check_named_base(tmp_path, [str(tmp_path / "base")])
    check_named_base(tmp_path, ["elsewhere", str(tmp_path / "link")])
    with pytest.raises(
        InputError, match=f"was trained on {tmp_path / 'link'} by its .*, and the run's base model is a/b"
    ):
        check_named_base(tmp_path, ["a/b"])
