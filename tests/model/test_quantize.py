"""Four-bit weights: what they stand for, trained beside, counted, told, and turned back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from packed import LENGTHS, TOKENS, assert_close_gradients, documents, gradients, logits_alone, logits_of, row_of
from slipstream import InputError, Options, apply
from slipstream.model import quantize
from slipstream.model.load import LoadOptions, load_model
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.model.quantize import (
    check_installed,
    check_quantize,
    dequantise,
    nf4_config,
    parameter_count,
    quantised_modules,
    quantize_decisions,
)
from slipstream.model.trainable import trainable_summary
from tiny import tiny_model

NF4 = LoadOptions(quantize="nf4", dtype="float32")
LEVELS = torch.tensor(
    [
        *[-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0],
        *[0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.5626170, 0.72295684, 1.0],
    ]
)
"""Quantiles of the normal distribution, an equal share of it between each two (Dettmers et al. 2023, appendix E)."""
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.fixture
def _four_bits() -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra nf4")


def saved(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> nn.Module:
    """A tiny model, left in ``folder``."""
    torch.manual_seed(0)
    model = tiny_model(kind, **overrides).to(dtype)
    model.save_pretrained(folder)
    return model


def with_adapter(model: Any) -> Any:
    """A LoRA that does something: random on both sides."""
    adapted = add_adapter(model, AdapterOptions(rank=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    return adapted.train()


def nearest_levels(weight: torch.Tensor) -> torch.Tensor:
    """A weight rounded to NF4 in blocks of 64, by the definition, with exact block scales."""
    blocks = weight.float().reshape(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / scale[..., None] - LEVELS).abs().argmin(-1)
    return (LEVELS[nearest] * scale).reshape(weight.shape)


# What is loaded


@pytest.mark.usefixtures("_four_bits")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_weights_are_rounded_to_quantiles_in_blocks(stored: torch.dtype, tmp_path: Path) -> None:
    plain = saved(tmp_path, dtype=stored)
    model = load_model(str(tmp_path), NF4)
    four_bit = quantised_modules(model)
    assert {name.rpartition(".")[2] for name in four_bit} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert all(module.weight.quant_state.nested for module in four_bit.values())  # block scales in 8 bits
    assert all(module.compute_dtype == torch.float32 for module in four_bit.values())
    back = dict(dequantise(model, torch.float32).named_modules())
    for name in four_bit:
        weight = plain.get_submodule(name).weight
        scale = weight.abs().max()
        difference = (back[name].weight - nearest_levels(weight)).abs()
        assert (difference > 0.02 * scale).float().mean() < 0.01  # but for a few on the border of two levels
        assert 0.01 * scale < (back[name].weight - weight).abs().mean() < 0.1 * scale


@pytest.mark.usefixtures("_four_bits")
def test_what_is_no_linear_layer_stays_as_it_was(tmp_path: Path) -> None:
    plain = saved(tmp_path, "qwen3_moe", torch.float32, **MIXTURE)
    model = load_model(str(tmp_path), NF4)
    four_bit = {f"{name}.weight" for name in quantised_modules(model)}
    experts = [name for name, _ in plain.named_parameters() if ".experts." in name]
    assert experts
    for name, parameter in plain.named_parameters():
        if name not in four_bit:
            assert torch.equal(model.get_parameter(name), parameter), name
    assert four_bit.isdisjoint(experts)
    assert "lm_head.weight" not in four_bit


@pytest.mark.usefixtures("_four_bits")
def test_parameters_are_counted_as_what_they_stand_for(tmp_path: Path) -> None:
    plain = saved(tmp_path)
    total = sum(parameter.numel() for parameter in plain.parameters())
    model = load_model(str(tmp_path), NF4)
    assert sum(parameter.numel() for parameter in model.parameters()) < total  # two codes in a byte
    assert sum(parameter_count(parameter) for parameter in model.parameters()) == total
    summary = trainable_summary(with_adapter(model))
    assert summary.total - summary.trainable == total


@pytest.mark.usefixtures("_four_bits")
def test_the_decision_tells_the_share(tmp_path: Path) -> None:
    plain = saved(tmp_path)
    assert quantize_decisions(plain) == []
    model = load_model(str(tmp_path), NF4)
    inside = sum(parameter_count(module.weight) for module in quantised_modules(model).values())
    total = sum(parameter.numel() for parameter in plain.parameters())
    (decision,) = quantize_decisions(model)
    assert (decision.name, decision.on) == ("nf4", True)
    assert decision.reason.startswith(f"{inside / total:.0%} of {total:,} parameters")


# What is trained beside it


@pytest.mark.usefixtures("_four_bits")
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_gradients_are_those_of_the_plain_weights_it_stands_for(activations: Any, tmp_path: Path) -> None:
    saved(tmp_path)
    row, made = row_of(documents()), []
    for turn_back in (False, True):
        model = load_model(str(tmp_path), NF4)
        if turn_back:
            model = dequantise(model, torch.float32)
        assert bool(quantised_modules(model)) is not turn_back
        model = apply(with_adapter(model), Options(activations=activations))
        logits = logits_of(model, row)
        logits.square().sum().backward()
        made.append((logits.detach(), gradients(model)))
    (logits, ours), (expected, theirs) = made
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert_close_gradients(ours, theirs, 1e-4)


@pytest.mark.usefixtures("_four_bits")
def test_a_packed_row_gives_what_its_documents_give_alone(tmp_path: Path) -> None:
    saved(tmp_path)
    model = with_adapter(load_model(str(tmp_path), NF4)).eval()
    examples = documents()
    alone = logits_alone(model, examples)
    packed = logits_of(apply(model), row_of(examples))
    assert sum(LENGTHS) < TOKENS
    torch.testing.assert_close(packed[0, : sum(LENGTHS)], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_four_bits")
@pytest.mark.filterwarnings("ignore")
def test_a_decoder_layer_is_one_graph(tmp_path: Path) -> None:
    saved(tmp_path, num_hidden_layers=4)
    model = with_adapter(load_model(str(tmp_path), NF4))
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def trained() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(input_ids=torch.arange(40)[None], use_cache=False).logits.square().sum().backward()
        return gradients(model)

    eager = trained()
    torch._dynamo.reset()
    for layer in model.get_base_model().model.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=keep)
    compiled = trained()
    assert len(graphs) == 2  # one for all layers but the first, whose input takes no gradient
    assert_close_gradients(compiled, eager, 1e-4)


# Turned back


@pytest.mark.usefixtures("_four_bits")
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
def test_what_is_turned_back_computes_the_same_and_is_saved_as_plain(kind: str, tmp_path: Path) -> None:
    extra = {"qwen3_moe": MIXTURE, "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2}}
    saved(tmp_path, kind, **extra.get(kind, {}))
    model = load_model(str(tmp_path), NF4)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        plain = dequantise(model, torch.float32)
        torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=1e-6, atol=1e-6)
        assert quantised_modules(plain) == {}
        plain.save_pretrained(tmp_path / "out")
        assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
        again = load_model(str(tmp_path / "out"), LoadOptions(dtype="float32"))
        torch.testing.assert_close(again(input_ids=ids).logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_four_bits")
def test_a_checkpoint_that_is_four_bit_itself(tmp_path: Path) -> None:
    saved(tmp_path / "base")
    model = load_model(str(tmp_path / "base"), NF4)
    model.save_pretrained(tmp_path / "four")
    loaded = load_model(str(tmp_path / "four"), LoadOptions(dtype="float32"))
    assert quantised_modules(loaded).keys() == quantised_modules(model).keys()
    plain, expected = dequantise(loaded, torch.float32), dequantise(model, torch.float32)
    for name, parameter in expected.named_parameters():
        assert torch.equal(plain.get_parameter(name), parameter), name


@pytest.mark.usefixtures("_four_bits")
def test_inference_leaves_weights_trainable(tmp_path: Path) -> None:
    saved(tmp_path)
    model = load_model(str(tmp_path), NF4)
    for module in quantised_modules(model).values():
        assert module.support_avx512bf16_for_cpu is False  # whatever this CPU has


@pytest.mark.usefixtures("_four_bits")
def test_weights_are_turned_back_by_way_of_the_dtype_that_trained(tmp_path: Path) -> None:
    saved(tmp_path)
    computes = LoadOptions(quantize="nf4", dtype="bfloat16")
    half, full = (dequantise(load_model(str(tmp_path), computes), dtype) for dtype in (torch.bfloat16, torch.float32))
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in full.parameters()} == {torch.float32}
    exact = dequantise(load_model(str(tmp_path), NF4), torch.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(half.get_parameter(name).float(), full.get_parameter(name))
    assert not torch.equal(full.get_parameter(name), exact.get_parameter(name))


# Bad input


def test_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quantize, "find_spec", lambda _: None)
    told = r"load\.quantize: nf4 needs bitsandbytes, which is not installed; pip install 'slipstream\[nf4\]'"
    with pytest.raises(InputError, match=told):
        check_quantize("nf4", has_card=True)
    with pytest.raises(InputError, match=told):
        nf4_config(torch.bfloat16)
    saved(tmp_path)
    with pytest.raises(InputError, match=told):
        load_model(str(tmp_path), NF4)
    check_quantize("none", has_card=False)


def test_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "find_spec", lambda _: object())
    with pytest.raises(InputError, match=r"load\.quantize: nf4 needs a CUDA card, .*; set load\.quantize: none"):
        check_quantize("nf4", has_card=False)
    check_quantize("nf4", has_card=True)
    check_installed()
