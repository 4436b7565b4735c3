import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as gguf_format
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from slipstream.errors import InputError
from slipstream.model import gguf
from slipstream.model.load import LoadOptions, load, load_model, load_tokenizer
from tiny import CHATML, tiny_tokenizer

FLOAT32 = LoadOptions(dtype="float32")
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
VOCABULARY = 320


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slipstream" / "models"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def write_gguf(path: Path, *, leave_out: str = "") -> Path:
    """A llama with random weights, its matrices in 8 bits, and a byte-level tokenizer with a chat template."""
    writer = gguf_format.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCABULARY)
    add_tokenizer(writer)
    random = np.random.default_rng(0)
    for name, shape in tensor_shapes().items():
        values = random.normal(scale=0.1, size=shape).astype(np.float32)
        if name == leave_out:
            continue
        if len(shape) == 1:
            writer.add_tensor(name, 1 + values)
        else:
            packed = gguf_format.quantize(values, gguf_format.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf_format.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf_format.GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    filler = [f"<|unused{i}|>" for i in range(VOCABULARY - len(tokens))]
    special = set(tokenizer.added_tokens_decoder)
    kinds = [
        gguf_format.TokenType.CONTROL if i in special else gguf_format.TokenType.NORMAL for i in range(len(tokens))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, *filler])
    writer.add_token_types([*kinds, *[gguf_format.TokenType.UNUSED] * len(filler)])
    writer.add_token_merges(["Ċ Ċ", "t h", "th e", "Ġ the", "Ġ a", ": Ġ"])
    writer.add_bos_token_id(tokenizer.convert_tokens_to_ids("<|im_start|>"))
    writer.add_eos_token_id(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    writer.add_unk_token_id(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    writer.add_chat_template(CHATML)


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    key_value = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (key_value, HIDDEN),
            f"blk.{layer}.attn_v.weight": (key_value, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INTERMEDIATE),
        }
    return shapes


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


def test_two_processes_converting_at_once_both_succeed(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def while_another_finishes(folder: Path) -> None:
        (folder / "mine").touch()
        write: Callable[[Path], None] = lambda other: (other / "theirs").touch()  # noqa: E731
        gguf._once(target, write)

    assert gguf._once(target, while_another_finishes) == target
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in target.iterdir()] == ["theirs"]
