"""Models of real shapes with random weights, and documents of realistic lengths to fill a row.

What a step costs depends on shapes alone, so no weights are needed; they are made on the device. Lengths are lognormal
with a mean of about 250 tokens, as in common instruction sets. ``tiny`` is for machines without a card: it proves that
the benchmark works and says nothing about speed worth quoting.
"""

import random
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.bench.known_shapes import MIXTURES, SHAPES
from slipstream.cost.hardware import compute_dtype, describe
from slipstream.errors import InputError
from slipstream.model.lora import AdapterOptions, add_adapter

SHORTEST = 16
"""Tokens of the shortest document."""
SMALLEST_ROW = 64


def shape_config(name: str, layers: int | None = None) -> Any:
    """The configuration of a shape, with fewer ``layers`` if given. Raises ``InputError`` for a name unknown."""
    shapes = {**SHAPES, **MIXTURES}
    if name not in shapes:
        near = get_close_matches(name, shapes, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"shape {name!r} is unknown; {hint}there is {', '.join(shapes)}")
    settings = dict(shapes[name])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    if layers is not None:
        if not 2 <= layers <= config.num_hidden_layers:
            raise InputError(f"layers {layers}: {name} has {config.num_hidden_layers}; ask for 2 to as many")
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def bench_dtype(device: torch.device) -> torch.dtype:
    """What layers compute in: bf16 on cards that multiply it, else float32."""
    if device.type != "cuda":
        return torch.float32
    dtype: torch.dtype = getattr(torch, compute_dtype(describe(device)))
    return dtype


def adapted_model(config: Any, device: torch.device, *, experts: bool = False, nf4: bool = False) -> Any:
    """A random model with a rank-16 adapter on all dense linear layers, in training mode; the same at every call.

    ``experts`` puts adapters on the experts, too; ``nf4`` holds the decoder's linear layers in four bits.
    """
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=bench_dtype(device))
    if nf4:
        hold_in_four_bits(model)
    return add_adapter(model, AdapterOptions(rank=16, alpha=16, experts=experts), seed=0).train()


def hold_in_four_bits(base: Any) -> None:
    """Put the decoder's linear layers into NF4 with doubly quantised scales, one at a time: ``load.quantize: nf4`` for
    a model that lies nowhere."""
    import bitsandbytes as bnb

    for parent in list(base.get_decoder().modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            shape, bias = (child.in_features, child.out_features), child.bias is not None
            made = bnb.nn.Linear4bit(*shape, bias=bias, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
            weight = child.weight.data.to("cpu")
            made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True)
            if child.bias is not None:
                made.bias = nn.Parameter(child.bias.data.to("cpu"), requires_grad=False)
            setattr(parent, name, made.to(child.weight.device))


def random_documents(tokens: int, vocabulary: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """At least two documents that fill a row of ``tokens`` tokens exactly; ``InputError`` for a row too small."""
    if tokens < SMALLEST_ROW:
        raise InputError(f"tokens {tokens} < {SMALLEST_ROW}: the row must hold several documents; raise --tokens")
    draw = random.Random(seed)
    made: list[dict[str, list[int]]] = []
    left = tokens
    while left:
        length = min(max(SHORTEST, int(draw.lognormvariate(5.2, 0.8))), left, tokens // 2)
        length = left if left - length < SHORTEST and made else length
        made.append({"input_ids": [draw.randrange(3, vocabulary) for _ in range(length)]})
        left -= length
    return made


def long_documents(tokens: int, longest: int, vocabulary: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Documents of an eighth of ``longest`` to ``longest`` tokens that fill a row exactly, the longest among them.

    With ``longest`` of at least ``tokens`` the row is one document. ``InputError`` for a row too small.
    """
    if tokens < SMALLEST_ROW:
        raise InputError(f"tokens {tokens} < {SMALLEST_ROW}: too few to measure anything; raise --tokens")
    draw = random.Random(seed)
    lengths = [min(longest, tokens)]
    while (left := tokens - sum(lengths)) > 0:
        length = min(draw.randint(max(SHORTEST, longest // 8), longest), left)
        lengths.append(left if left - length < SHORTEST and left <= longest else length)
    return [{"input_ids": draw.choices(range(3, vocabulary), k=length)} for length in lengths]
