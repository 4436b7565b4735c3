"""Which models can be divided; what dividing them does is in ``test_ranks.py``."""

import pytest
import torch
from torch import nn

from slipstream.errors import InputError
from slipstream.train.sharding import is_divided, layers_to_divide
from tiny import tiny_model


def test_layers_are_found_below_an_adapter() -> None:
    from slipstream.model.lora import AdapterOptions, add_adapter

    model = add_adapter(tiny_model(), AdapterOptions(rank=2), seed=0)
    assert [type(layer).__name__ for layer in layers_to_divide(model)] == ["LlamaDecoderLayer"] * 2
    assert not is_divided(model)


def test_quantised_weights_are_refused() -> None:
    model = tiny_model()
    packed = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    model.model.layers[1].mlp.up_proj.weight = packed
    with pytest.raises(InputError, match=r"model.layers.1.mlp.up_proj.weight holds quantised numbers.*sharding: none"):
        layers_to_divide(model)


def test_a_model_without_named_layers_is_refused() -> None:
    model = tiny_model()
    model._no_split_modules = None
    with pytest.raises(InputError, match="LlamaForCausalLM names no layers to divide it by; leave sharding: none"):
        layers_to_divide(model)
