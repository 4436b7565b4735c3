"""The arithmetic of memory: by hand for one layer, and beside what autograd does keep."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packed import documents, logits_of, model_of, row_of, with_adapter
from slipstream import apply
from slipstream.cost.estimate import (
    LOSS_CHUNK,
    dense_mask_bytes,
    kept_activation_bytes,
    loss_bytes,
    packing_saved_forward,
    packing_saved_seconds,
)


def config(**changes: Any) -> Any:
    settings = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "vocab_size": 1000,
    }
    return SimpleNamespace(**{**settings, **changes})


def test_by_hand() -> None:
    query, key = 4 * 32, 2 * 32
    layer_token = 18 * 64 + 10 * query + 8 * key + 8 * 256
    assert kept_activation_bytes(config(), 100) == 3 * 100 * layer_token
    assert kept_activation_bytes(config(), 100, itemsize=4) == 3 * 100 * (16 * 64 + 12 * query + 12 * key + 16 * 256)
    assert loss_bytes(config(), 100) == 1000 * (4 * 100 + 16 * 100)
    assert loss_bytes(config(), 10_000) == 1000 * (4 * 10_000 + 16 * LOSS_CHUNK)
    assert loss_bytes(config(), 10_000, whole_logits=False) == 1000 * 16 * LOSS_CHUNK


def test_it_grows_with_tokens_and_layers() -> None:
    once = kept_activation_bytes(config(), 100)
    assert kept_activation_bytes(config(), 200) == 2 * once
    assert kept_activation_bytes(config(num_hidden_layers=6), 100) == 2 * once


@pytest.mark.parametrize(
    ("missing", "same_as"),
    [
        ({"head_dim": None}, {"head_dim": 16}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": 4}),
        ({"intermediate_size": None}, {"intermediate_size": 256}),
    ],
)
def test_what_a_config_leaves_out_has_its_usual_value(missing: Any, same_as: Any) -> None:
    assert kept_activation_bytes(config(**missing), 7) == kept_activation_bytes(config(**same_as), 7)


def test_beside_what_autograd_keeps() -> None:
    """Within a factor of 1.5 of the bytes that a float32 forward saves, halved for half precision."""
    lengths, sizes = (100, 156), {"hidden_size": 64, "head_dim": 32, "intermediate_size": 192}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        held.append(tensor)
        return tensor

    def bytes_of(layers: int) -> int:
        model = model_of("llama", num_hidden_layers=layers, **sizes)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        tuned = apply(with_adapter(model)).train()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits_of(tuned, row_of(documents(lengths), 256))
        weights = {p.untyped_storage().data_ptr() for p in tuned.parameters()}
        return sum(size for place, size in saved.items() if place not in weights)

    held: list[torch.Tensor] = []
    layers = bytes_of(3) - bytes_of(1)
    predicted = kept_activation_bytes(model_of("llama", num_hidden_layers=2, **sizes).config, 256)
    assert layers / 2 / 1.5 < predicted < layers * 1.5


def test_packing_saves_all_builds_but_one() -> None:
    assert packing_saved_seconds(16, 0.0137, recompute=False) == pytest.approx(0.206, rel=0.005)  # the published two
    assert packing_saved_seconds(28, 0.0137, recompute=False) == pytest.approx(0.370, rel=0.005)
    assert packing_saved_seconds(28, 0.01, recompute=True) == pytest.approx(55 * 0.01)
    assert packing_saved_forward(28, 0.01) == pytest.approx(27 * 0.01)
    assert packing_saved_seconds(1, 0.01, recompute=False) == 0


def test_bytes_of_dense_masks() -> None:
    assert dense_mask_bytes(2048, 2) == 2048 * 2048 * 4
    assert dense_mask_bytes(2048, 2, kept=16) == 2048 * 2048 * 34
