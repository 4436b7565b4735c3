"""What a step's mode depends on, read off a model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slipstream import apply
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.train.circumstances import circumstances
from tiny import tiny_model


def in_four_bits(linear: nn.Linear) -> None:
    """Codes as bitsandbytes packs them: two in a byte, with the shape that they stand for beside them."""
    shape = linear.weight.shape
    codes: Any = nn.Parameter(torch.zeros(shape.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
    codes.quant_state = SimpleNamespace(shape=shape)
    linear.weight = codes


def adapted(rank: int, *, quantised: bool) -> Any:
    model = add_adapter(tiny_model(vocab_size=32), AdapterOptions(rank=rank), seed=0)
    for name, module in model.named_modules():
        if quantised and name.endswith("base_layer"):
            in_four_bits(module)
    return apply(model)


def numbers(model: Any) -> tuple[int, int]:
    """Elements that are trained, and all that are held."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def test_all_weights_are_whole_and_adapters_are_not() -> None:
    assert circumstances(apply(tiny_model())).whole
    assert not circumstances(adapted(1, quantised=False)).whole


@pytest.mark.parametrize("rank", [12, 24])
def test_four_bit_codes_count_as_the_weights_they_stand_for(rank: int) -> None:
    """Adapters of between half and all of the weights' number, and of more."""
    plain, codes = adapted(rank, quantised=False), adapted(rank, quantised=True)
    trained, held = numbers(codes)
    assert 2 * trained > held  # by elements, four bits would make all the difference
    assert circumstances(codes).whole == circumstances(plain).whole == (rank == 24)
