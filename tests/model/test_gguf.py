import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from slipstream.errors import InputError
from slipstream.model import gguf
from slipstream.model.load import LoadOptions, load, load_model, load_tokenizer
from slipstream.model.lora import AdapterOptions, add_adapter, load_adapter
from tiny import CHATML
from tiny_gguf import write_gguf

FLOAT32 = LoadOptions(dtype="float32")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slipstream" / "models"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None]).logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_converted_model_equals_the_file_read_directly(file: Path, cache: Path, dtype: str) -> None:
    model, tokenizer = load(str(file), LoadOptions(dtype=dtype))  # type: ignore[arg-type]
    direct = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype))
    assert logits(model).dtype == getattr(torch, dtype)
    torch.testing.assert_close(logits(model), logits(direct), rtol=0, atol=0)
    plain = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = "<|im_start|>user\n  the théme:  x<|im_end|>"
    assert tokenizer.encode(text) == plain.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template == CHATML


def test_the_cached_folder_is_an_ordinary_model(file: Path, cache: Path) -> None:
    model = load_model(str(file), FLOAT32)
    (folder,) = cache.glob("*/float32")
    assert load_file(folder / "model.safetensors")["model.norm.weight"].dtype == torch.float32
    assert "quantization_config" not in (folder / "config.json").read_text()
    assert model.generation_config.eos_token_id == model.config.eos_token_id is not None
    assert not getattr(model, "is_quantized", False)
    again, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    assert tokenizer.chat_template == CHATML


def test_tied_weights_stay_one_tensor(file: Path, cache: Path) -> None:
    model = gguf._dequantised(gguf.open_gguf(file), "float32")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    load_model(str(file), FLOAT32)
    (weights,) = cache.glob("*/float32/model.safetensors")
    assert "lm_head.weight" not in load_file(weights)


def test_a_file_is_converted_once(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_model(str(file), FLOAT32)
    copy = file.with_name("elsewhere.gguf")
    copy.write_bytes(file.read_bytes())

    def fail(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf, "_dequantised", fail)
    monkeypatch.setattr(gguf, "_convert_tokenizer", fail)
    torch.testing.assert_close(logits(load_model(str(copy), FLOAT32)), logits(first), rtol=0, atol=0)
    copy.write_bytes(file.read_bytes() + b"\0")  # other content, other digest
    with pytest.raises(AssertionError, match="converted again"):
        load_model(str(copy), FLOAT32)


def test_the_tokenizer_alone_needs_no_weights(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_dequantised", lambda *_: pytest.fail("weights were read"))
    assert load_tokenizer(str(file), FLOAT32).chat_template == CHATML
    assert [path.name for path in cache.glob("*/*")] == ["tokenizer"]


def test_a_file_that_is_no_gguf(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    for function in (load_model, load_tokenizer):
        with pytest.raises(
            InputError, match=r"model\.gguf starts with b'PK.*', a GGUF file with b'GGUF'; give a hub id"
        ):
            function(str(path), FLOAT32)
    assert not cache.exists()


@pytest.mark.parametrize("share", [0.001, 0.01, 0.04, 0.5, 0.9999])
def test_a_file_cut_off(file: Path, cache: Path, share: float) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(InputError, match=r"tiny\.gguf cannot be converted .*; check that the file is whole"):
        load_model(str(file), FLOAT32)
    assert not list(cache.glob("*/float32"))


def test_a_file_without_some_tensor(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "part.gguf", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(
        InputError, match=r"lacks 1 of the model's tensors, e\.g\. model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load_model(str(file), FLOAT32)
    assert [path.name for path in cache.glob("*/*")] == ["tokenizer"]


def test_no_space_is_told_before_writing(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_tokenizer(str(file), FLOAT32)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(
        InputError, match=r"the converted model takes 0\.00 GB, and .* has 0\.00 GB free; .*XDG_CACHE_HOME"
    ):
        load_model(str(file), FLOAT32)
    assert [path.name for path in cache.glob("*/*")] == ["tokenizer"]  # nothing half-written is left


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("I/O error: No space left (os error 28)")],
)
def test_no_space_while_writing_leaves_nothing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fill_up(self: PreTrainedModel, folder: Path, **_: Any) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fill_up)
    with pytest.raises(InputError, match=r"the converted model does not fit, and .* make room, or set XDG_CACHE_HOME"):
        load_model(str(file), FLOAT32)
    assert [path.name for path in cache.glob("*/*")] == ["tokenizer"]
    monkeypatch.undo()


@pytest.mark.parametrize("written", ["tiny.gguf", "./tiny.gguf"])
def test_an_adapters_config_and_card_name_the_file_and_not_the_cache(
    file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.chdir(file.parent)
    named = str(file)  # from any folder
    model = load_model(written, FLOAT32)
    assert model.name_or_path == model.config.name_or_path == named
    with pytest.raises(HFValidationError):
        validate_repo_id(named)  # peft looks a hub id up at every save
    adapted = add_adapter(model, AdapterOptions(), seed=0)
    adapted.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == named
    card = (tmp_path / "adapter/README.md").read_text()
    assert f"base_model: {named}" in card
    assert str(cache) not in card
    again = load_adapter(load_model(written, FLOAT32), tmp_path / "adapter")
    torch.testing.assert_close(logits(again), logits(adapted), rtol=0, atol=0)


def test_a_cache_folder_that_cannot_be_made_is_told_by_its_name(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file / "cache"))  # a folder in a file
    for function in (load_model, load_tokenizer):
        with pytest.raises(
            InputError,
            match=r"the cache folder .*tiny\.gguf/cache/slipstream/models/\w+ cannot be made .*XDG_CACHE_HOME",
        ):
            function(str(file), FLOAT32)


def test_two_processes_converting_at_once_both_succeed(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def while_another_finishes(folder: Path) -> None:
        (folder / "mine").touch()
        write: Callable[[Path], None] = lambda other: (other / "theirs").touch()  # noqa: E731
        gguf._once(target, write)

    assert gguf._once(target, while_another_finishes) == target
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in target.iterdir()] == ["theirs"]
