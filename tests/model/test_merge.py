"""An adapter added to its base and saved: what plain transformers loads gives the adapted model's logits."""

import errno
import json
import os
import shutil
import warnings
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from slipstream.errors import InputError
from slipstream.model import merge
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.model.merge import merge_adapter, save_model, unused_folder, weight_bytes, written_whole
from tiny import CHATML, tiny_model, tiny_tokenizer

EMBEDDING = 320 * 32
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
Disk = namedtuple("Disk", ["total", "used", "free"])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(60)[None]).logits


def parameters_of(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def disturb(model: torch.nn.Module) -> None:
    """Give every trained weight a value of its own: a fresh adapter adds nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def base_and_adapter(folder: Path, kind: str = "llama", dtype: str = "float32", **options: Any) -> tuple[Path, Path]:
    """The folders of a tiny model, in ``dtype``, and of a float32 adapter trained on it."""
    overrides = options.pop("model", {})
    model = tiny_model(kind, **overrides).to(getattr(torch, dtype))
    model.save_pretrained(folder / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, on tied embeddings
        adapted = add_adapter(model, AdapterOptions(rank=4, alpha=8, **options), seed=0)
        disturb(adapted)
        adapted.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def load(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def with_adapter(base: Path, adapter: Path) -> torch.Tensor:
    """The logits of the base with its adapter beside it, in float32, by peft alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return logits(PeftModel.from_pretrained(load(base), adapter))


def merged_into(out: Path, base: Path, adapter: Path, dtype: Any = "float32", load_in: str = "float32") -> Path:
    model = load(base, load_in)
    count = parameters_of(model)
    with written_whole(out) as built:
        save_model(merge_adapter(model, adapter, dtype=dtype, base_parameters=count), tiny_tokenizer(), built)
    return out


CASES: dict[str, dict[str, Any]] = {
    "all-linear": {},
    "rslora": {"rslora": True},
    "qwen3": {"kind": "qwen3"},
    "experts left alone": {"kind": "qwen3_moe", "model": MIXTURE},
    "head trained whole": {"modules_to_save": ["lm_head"]},
    "embedding adapted": {"targets": ["embed_tokens", "q_proj"]},
    "tied": {"model": {"tie_word_embeddings": True}},
    "tied, head trained whole": {"model": {"tie_word_embeddings": True}, "modules_to_save": ["lm_head"]},
    "tied, embedding trained whole": {"model": {"tie_word_embeddings": True}, "modules_to_save": ["embed_tokens"]},
    "tied, head adapted": {"model": {"tie_word_embeddings": True}, "targets": ["lm_head"]},
    "tied, embedding adapted": {"model": {"tie_word_embeddings": True}, "targets": ["embed_tokens"]},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("error:.*tie_word_embeddings")
def test_the_merged_model_gives_the_adapted_models_logits(case: str, tmp_path: Path) -> None:
    base, adapter = base_and_adapter(tmp_path, **dict(CASES[case]))
    expected = with_adapter(base, adapter)
    assert (expected - logits(load(base))).abs().max() > 0.01  # the adapter does something
    out = merged_into(tmp_path / "out", base, adapter)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(out)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("tied")])
def test_a_shared_tensor_stays_one_only_where_nothing_was_done_to_it(case: str, tmp_path: Path) -> None:
    base, adapter = base_and_adapter(tmp_path, **dict(CASES[case]))
    assert "lm_head.weight" not in load_file(base / "model.safetensors")
    out = merged_into(tmp_path / "out", base, adapter)
    parted = case != "tied"
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) is parted
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is not parted
    extra = parameters_of(AutoModelForCausalLM.from_pretrained(out)) - parameters_of(load(base))
    assert extra == (EMBEDDING if parted else 0)


@pytest.mark.parametrize(
    ("stored", "wanted", "load_in"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "bfloat16", "float32"),
        ("float16", "float16", "float16"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float16", "float32"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_the_sum_is_made_in_float32_and_rounded_once(stored: str, wanted: str, load_in: str, tmp_path: Path) -> None:
    base, adapter = base_and_adapter(tmp_path, dtype=stored, modules_to_save=["lm_head"])
    out = merged_into(tmp_path / "out", base, adapter, wanted, load_in)
    before, delta = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    after = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {getattr(torch, wanted)}
    assert AutoModelForCausalLM.from_pretrained(out).dtype == getattr(torch, wanted)  # as its config says
    rounded_twice = 0
    for name in [name for name in before if name.endswith("proj.weight")]:
        part = f"base_model.model.{name.removesuffix('.weight')}"
        added = delta[f"{part}.lora_B.weight"] @ delta[f"{part}.lora_A.weight"] * 2.0
        assert torch.equal(after[name], (before[name].float() + added).to(getattr(torch, wanted)))
        rounded_twice += int((after[name] != before[name] + added.to(before[name].dtype)).sum())
    if wanted == stored:
        assert rounded_twice > 0  # it matters
    head = delta["base_model.model.lm_head.weight"]
    assert torch.equal(after["lm_head.weight"], head.to(getattr(torch, load_in)).to(getattr(torch, wanted)))


EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": MIXTURE,
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def base_and_expert_adapter(folder: Path, kind: str, dtype: torch.dtype) -> tuple[Path, Path]:
    """As ``base_and_adapter``, with adapters on the experts' stacked matrices, in peft's own format."""
    model = tiny_model(kind, **EXPERTS[kind]).to(dtype)
    model.save_pretrained(folder / "base")
    stacks = [name for name, weight in model.named_parameters() if ".experts." in name and weight.ndim == 3]
    assert len(stacks) == 4
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=stacks, init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.filterwarnings("ignore")
def test_adapters_on_experts_are_added_too(kind: str, tmp_path: Path) -> None:
    base, adapter = base_and_expert_adapter(tmp_path, kind, torch.float32)
    expected = with_adapter(base, adapter)
    assert (expected - logits(load(base))).abs().max() > 0.01
    out = merged_into(tmp_path / "out", base, adapter)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(out)), expected, rtol=0, atol=1e-5)
    assert sorted(load_file(out / "model.safetensors")) == sorted(load_file(base / "model.safetensors"))


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.filterwarnings("ignore")
def test_adapters_on_experts_are_rounded_once(kind: str, tmp_path: Path) -> None:
    base, adapter = base_and_expert_adapter(tmp_path, kind, torch.bfloat16)
    half, full = (load(base, dtype) for dtype in ("bfloat16", "float32"))
    count = parameters_of(half)
    merged, exact = (
        dict(merge_adapter(model, adapter, dtype="bfloat16", base_parameters=count).named_parameters())
        for model in (half, full)
    )
    assert all(torch.equal(merged[name], exact[name]) for name in exact)
    before = load(base, "bfloat16")
    stack = next(name for name in merged if name.endswith("experts.down_proj"))
    assert not torch.equal(merged[stack], before.get_parameter(stack))


def test_logits_of_a_bf16_model_differ_by_rounding(tmp_path: Path) -> None:
    base, adapter = base_and_adapter(tmp_path, dtype="bfloat16")
    out = merged_into(tmp_path / "out", base, adapter, "bfloat16", "bfloat16")
    expected = with_adapter(base, adapter)
    change = (expected - logits(load(base))).abs().max()
    assert (logits(load(out)) - expected).abs().max() < 0.02 * change


def test_weights_that_the_model_keeps_in_float32_stay_so(tmp_path: Path) -> None:
    base, adapter = base_and_adapter(tmp_path, dtype="bfloat16")
    model = load(base, "bfloat16")
    model.model.norm.float()
    merged = merge_adapter(model, adapter, dtype="bfloat16", base_parameters=parameters_of(model))
    assert merged.model.norm.weight.dtype == torch.float32
    assert merged.lm_head.weight.dtype == torch.bfloat16


def test_what_lies_beside_the_weights(tmp_path: Path) -> None:
    base, adapter = base_and_adapter(tmp_path)
    # a temperature without sampling breaks transformers' rules for saving; published models come with that
    published = {"eos_token_id": [3, 270], "temperature": 0.6, "do_sample": False, "max_new_tokens": 77}
    (base / "generation_config.json").write_text(json.dumps(published))
    out = merged_into(tmp_path / "out", base, adapter)
    written = GenerationConfig.from_pretrained(out)
    assert {name: getattr(written, name) for name in published} == published
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.encode("<|im_start|>the") == tiny_tokenizer().encode("<|im_start|>the")
    assert not list(out.glob("adapter*"))
    again = add_adapter(AutoModelForCausalLM.from_pretrained(out), AdapterOptions(rank=2), seed=0)  # a base like others
    assert logits(again).isfinite().all()


@pytest.mark.parametrize("other", [{"hidden_size": 48}, {"num_hidden_layers": 3}, {"vocab_size": 400}])
def test_another_base_model(other: dict[str, int], tmp_path: Path) -> None:
    base, adapter = base_and_adapter(tmp_path)
    count = parameters_of(load(base))
    with pytest.raises(
        InputError, match=rf"was trained on a model of {count:,} parameters, and .* has [\d,]+; use the base model"
    ):
        merge_adapter(tiny_model(**other), adapter, dtype="float32", base_parameters=count)


def test_another_base_model_is_known_by_its_shapes_too(tmp_path: Path) -> None:
    _, adapter = base_and_adapter(tmp_path)
    other = tiny_model(num_key_value_heads=2)
    with pytest.raises(InputError, match="does not fit"):
        merge_adapter(other, adapter, dtype="float32", base_parameters=parameters_of(other))


def test_a_quantised_base(tmp_path: Path) -> None:
    base, adapter = base_and_adapter(tmp_path)
    model: Any = load(base)
    model.hf_quantizer = type("Q", (), {"quantization_config": type("C", (), {"quant_method": "gptq"})()})()
    with pytest.raises(InputError, match=r"are quantised \(gptq\).*load .* with peft instead"):
        merge_adapter(model, adapter, dtype="float32", base_parameters=parameters_of(model))


def test_a_damaged_adapter(tmp_path: Path) -> None:
    base, adapter = base_and_adapter(tmp_path)
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"the weights in .*adapter are damaged"):
        merge_adapter(load(base), adapter, dtype="float32", base_parameters=parameters_of(load(base)))


# Where it is written


def fail_half_way(out: Path, error: BaseException) -> None:
    with written_whole(out) as built:
        (built / "half").write_text("x")
        assert built.parent.parent == out.parent  # beside it: one move is enough
        assert not out.exists()
        raise error


def save(model: PreTrainedModel, out: Path) -> None:
    """Save, and if that fails see that nothing had been written."""
    with written_whole(out) as built:
        try:
            save_model(model, tiny_tokenizer(), built)
        except InputError:
            assert list(built.iterdir()) == []
            raise


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with pytest.raises(KeyboardInterrupt):
        fail_half_way(out, KeyboardInterrupt())
    assert list(out.parent.iterdir()) == []
    with written_whole(out) as built:
        (built / "whole").write_text("x")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [
        "deep",
        "deep/out",
        "deep/out/whole",
    ]
    plain = tmp_path / "plain"
    plain.mkdir()
    assert out.stat().st_mode == plain.stat().st_mode  # as readable as any folder


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    target = unused_folder(tmp_path / "out")
    with written_whole(target) as built:
        (built / "whole").write_text("x")
    assert [path.name for path in target.iterdir()] == ["whole"]


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    (out / "too").write_text("y")
    with pytest.raises(InputError, match=r"out' is not empty \('mine' and 1 more\); choose another --out, or empty it"):
        unused_folder(out)
    with pytest.raises(InputError, match=r"mine' is a file; choose another --out"):
        unused_folder(out / "mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="is a link, which cannot be replaced; name a new folder inside it"):
        unused_folder(tmp_path / "link")
    with pytest.raises(InputError, match="is a mount point, which cannot be replaced"):
        unused_folder(Path("/proc"))
    with pytest.raises(InputError, match="taken by another meanwhile; choose another"), written_whole(out):
        pass
    assert (out / "mine").read_text() == "x"


def test_a_place_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(InputError, match=r"cannot be made \(.*\); choose another --out"),
        written_whole(tmp_path / "file" / "out"),
    ):
        pytest.fail("written into")


def test_space_is_looked_at_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = tiny_model(), tmp_path / "out"
    needed = weight_bytes(model) + merge.FOR_OTHER_FILES
    assert weight_bytes(model) >= 4 * parameters_of(model)
    free = needed - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(10**12, 0, free))
    with pytest.raises(InputError, match=rf"takes 0\.07 GB, and {tmp_path} has 0\.07 GB free"):
        save(model, out)
    assert list(tmp_path.iterdir()) == []
    free = needed
    save(model, out)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_up_meanwhile(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no space left for '.*out': .* GB\) free.*; make room"):
        fail_half_way(tmp_path / "out", error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), SafetensorError("invalid header")])
def test_other_failures_pass_as_they_are(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)), written_whole(tmp_path / "out"):
        raise error
