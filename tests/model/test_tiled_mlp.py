"""MLPs in tiles: the same outputs and gradients, one tile's activations at a time, nothing left behind."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from packed import documents, model_of, row_of, with_adapter
from slipstream import InputError, Options, apply, decisions, restore
from slipstream.cost.tiles import LONG_ROW, TILE, tile_tokens
from slipstream.model.half_adapters import HalfAdapters
from slipstream.model.tiled_mlp import TILED, tiled_mlps
from slipstream.step.regional import CompiledLayers
from slipstream.train.loss import summed_cross_entropy
from slipstream.transform import base_model

LENGTHS = (18, 1, 12, 14)
TILES = 16  # 45 tokens in three tiles, the last of 13


def adapted(family: str = "llama", dtype: torch.dtype = torch.float32, dropout: float = 0.0, **overrides: Any) -> Any:
    model = with_adapter(model_of(family, **overrides).to(dtype), dropout)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1
    return model.train()


def gradients_of(model: Any, half: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    row = row_of(documents(LENGTHS), sum(LENGTHS))
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        logits = model(**{name: value for name, value in row.items() if name != "labels"}).logits
    loss = summed_cross_entropy(logits, row["labels"])
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@contextmanager
def _runs(model: Any) -> Iterator[list[int]]:
    seen: list[int] = []
    hooks = [
        tile.module.gate_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[-2]))
        for tile in tiled_mlps(model)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("trained", ["adapters", "all"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "starcoder2", "qwen3"])
def test_the_same_loss_and_gradients(family: str, trained: str, activations: Any) -> None:
    model = adapted(family) if trained == "adapters" else model_of(family).train()
    loss, plain = gradients_of(apply(model, Options(activations=activations)))
    tiled, found = gradients_of(apply(model, Options(activations=activations, tiles=TILES)))
    assert len(tiled_mlps(model)) == base_model(model).config.num_hidden_layers
    assert torch.allclose(tiled, loss, rtol=1e-6)
    assert plain.keys() == found.keys()
    assert any(".mlp." in name for name in plain)
    for name, gradient in plain.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())), name


def test_a_recomputed_layer_runs_each_tile_twice_and_no_more() -> None:
    """The layer's recompute ends before the MLP: that is what makes tiles cost nothing."""
    model = apply(adapted(), Options(activations="recompute", tiles=TILES))
    layers = base_model(model).config.num_hidden_layers
    with _runs(model) as seen:
        gradients_of(model)
    assert len(seen) == 2 * layers * math.ceil(sum(LENGTHS) / TILES)
    assert max(seen) == TILES
    assert min(seen) == sum(LENGTHS) % TILES


def test_what_is_kept_is_the_input_alone() -> None:
    model = apply(adapted(), Options(activations="keep", tiles="none"))
    whole = _saved(model)
    tiled = _saved(apply(model, Options(activations="keep", tiles=TILES)))
    inner = base_model(model).config.intermediate_size
    assert any(shape[-1:] == (inner,) for shape in whole)
    assert not any(shape[-1:] == (inner,) and shape.numel() > inner for shape in tiled)


def _saved(model: Any) -> list[torch.Size]:
    """Shapes of what a forward keeps for its backward."""
    row = row_of(documents(LENGTHS), sum(LENGTHS))
    shapes: list[torch.Size] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(**{name: value for name, value in row.items() if name != "labels"})
    return shapes


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_half_precision_adapters_get_their_gradients(activations: Any) -> None:
    """Copies in half precision are what the MLP multiplies with; float32 masters get the sum over tiles."""
    model = apply(adapted(dtype=torch.bfloat16), Options(activations=activations))
    adapters, _ = HalfAdapters.attach(base_model(model), torch.bfloat16)
    assert adapters is not None
    _, plain = gradients_of(model, half=True)
    apply(model, Options(activations=activations, tiles=TILES))
    _, found = gradients_of(model, half=True)
    adapters.detach()
    _, exact = gradients_of(restore(model).float())
    for one in (plain, found):
        assert one.keys() == exact.keys()
    assert 0 < _error(found, exact) < 1.5 * _error(plain, exact)


def _error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    both = [torch.cat([one[name].flatten() for name in exact]) for one in (found, exact)]
    return float((both[0] - both[1]).norm() / both[1].norm())


def test_two_forwards_before_their_backwards() -> None:
    model = apply(adapted(), Options(activations="recompute", tiles=TILES))
    rows = [row_of(documents(LENGTHS, seed), sum(LENGTHS)) for seed in (0, 1)]

    def loss(row: dict) -> torch.Tensor:
        logits = model(**{name: value for name, value in row.items() if name != "labels"}).logits
        return summed_cross_entropy(logits, row["labels"])

    def gradient() -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    for row in rows:
        loss(row).backward()
    expected = gradient()
    model.zero_grad()
    first, second = loss(rows[0]), loss(rows[1])
    first.backward()
    second.backward(retain_graph=True)
    assert torch.allclose(gradient(), expected, rtol=1e-4, atol=1e-6)
    second.backward()
    assert not torch.allclose(gradient(), expected, rtol=1e-2)


def test_compiled_layers_have_compiled_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = apply(adapted(num_hidden_layers=1), Options(activations="recompute", tiles=TILES))
    _, plain = gradients_of(model)
    layers = CompiledLayers(base_model(model).get_decoder())
    torch._dynamo.reset()
    with layers.active():
        assert all(tile.compiled is not None for tile in tiled_mlps(model))
        _, found = gradients_of(model)
    assert all(tile.compiled is None for tile in tiled_mlps(model))
    for name, gradient in plain.items():
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max())), name


def test_without_gradients_tiles_too_and_short_rows_whole() -> None:
    model = apply(adapted(), Options(activations="recompute", tiles=TILES))
    row = {name: value for name, value in row_of(documents(LENGTHS), sum(LENGTHS)).items() if name != "labels"}
    with torch.no_grad(), _runs(model) as seen:
        tiled = model(**row).logits
        assert max(seen) == TILES
        whole = apply(model, Options(activations="recompute"))(**row).logits
    assert torch.allclose(tiled, whole, atol=1e-5)
    apply(model, Options(activations="recompute", tiles=TILES))
    short = {name: value for name, value in row_of(documents((10, 6)), 16).items() if name != "labels"}
    with _runs(model) as seen:
        model(**short)
    assert set(seen) == {16}


def test_dropout_that_comes_later_is_drawn_once() -> None:
    model = apply(adapted(), Options(activations="keep", tiles=TILES))
    for layer in model.modules():
        if hasattr(layer, "lora_dropout"):
            layer.lora_dropout["default"] = nn.Dropout(0.5)
    with _runs(model) as seen:
        gradients_of(model)
    assert set(seen) == {sum(LENGTHS)}


def test_restore_leaves_nothing() -> None:
    model = apply(adapted(), Options(activations="recompute", tiles=TILES))
    assert any(TILED in vars(module) for module in model.modules())
    restore(model)
    assert not any(TILED in vars(module) or "forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("asked", "tokens", "recomputed", "expected"),
    [
        ("auto", LONG_ROW + 1, True, TILE),
        ("auto", LONG_ROW, True, None),
        ("auto", LONG_ROW + 1, False, None),
        ("auto", None, True, None),
        ("none", 10 * LONG_ROW, True, None),
        (64, None, False, 64),
    ],
)
def test_when_rows_are_tiled(asked: Any, tokens: int | None, recomputed: bool, expected: int | None) -> None:
    assert tile_tokens(asked, tokens, recomputed=recomputed) == expected


def test_auto_tiles_long_rows_of_recomputed_layers_and_says_so() -> None:
    model = apply(adapted(), Options(activations="recompute", tokens=LONG_ROW + 1))
    (told,) = [one for one in decisions(model) if one.name == "tiled mlp"]
    assert told.on
    assert f"{TILE:,}" in told.reason
    assert len(tiled_mlps(model)) == base_model(model).config.num_hidden_layers
    apply(model, Options(activations="recompute", tokens=LONG_ROW))
    assert not tiled_mlps(model)
    apply(model, Options(activations="recompute", tokens=LONG_ROW + 1, tiles="none"))
    assert not tiled_mlps(model)
    assert [one.on for one in decisions(model) if one.name == "tiled mlp"] == [False]


@pytest.mark.parametrize(("family", "why"), [("mixtral", "to experts"), ("gpt_oss", "to experts")])
def test_mixtures_are_left_whole(family: str, why: str) -> None:
    model = model_of(family)
    with pytest.raises(InputError, match=why):
        apply(model, Options(tiles=TILES))
    assert not any("forward" in vars(module) for module in model.modules())
    apply(model, Options(activations="recompute", tokens=LONG_ROW + 1))
    assert [one.on for one in decisions(model) if one.name == "tiled mlp"] == [False]


def test_dropout_and_odd_mlps_are_refused() -> None:
    with pytest.raises(InputError, match="dropout"):
        apply(adapted(dropout=0.1), Options(tiles=TILES))
    model = model_of("llama")
    model.get_decoder().layers[1].mlp.hidden_dropout = 0.1  # for functional dropout: there is no module to find
    with pytest.raises(InputError, match="LlamaMLP has dropout"):
        apply(model, Options(tiles=TILES))
    model = model_of("llama")

    class Mixing(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + x.mean(dim=1, keepdim=True)

    for layer in model.get_decoder().layers:
        layer.mlp = Mixing(layer.mlp)
    with pytest.raises(InputError, match="each token by itself"):
        apply(model, Options(tiles=TILES))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_an_input_without_gradient(activations: Any) -> None:
    """The first layer's, where nothing before its MLP is trained."""
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name and ".mlp." in name)
    loss, plain = gradients_of(apply(model, Options(activations=activations)))
    tiled, found = gradients_of(apply(model, Options(activations=activations, tiles=TILES)))
    assert torch.allclose(tiled, loss, rtol=1e-6)
    assert any(".layers.0.mlp." in name for name in plain)
    assert plain.keys() == found.keys()
    for name, gradient in plain.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())), name
