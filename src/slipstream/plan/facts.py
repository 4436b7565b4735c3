"""What a plan starts from: the model without its weights, the documents' lengths, and the device.

The model is built without storage, so that what is counted (weights, adapters' places, what attention needs) is exact
for every family transformers knows, in under a second; its configuration gives the sizes of its parts. Documents are
tokenised as for training, from the cache where it has them, and only their lengths are kept.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from slipstream.cost.ceilings import Ceilings, named_device
from slipstream.cost.hardware import Device, describe, free_bytes, free_host_memory
from slipstream.cost.shape import ModelShape
from slipstream.data.packing import PackingReport
from slipstream.data.tokens import TokenisedSet
from slipstream.decision import Decision
from slipstream.device.ceilings import ceilings
from slipstream.device.driver import driver_version
from slipstream.errors import InputError
from slipstream.memory.checkpointing import checkpoint_layers
from slipstream.model.attention import Needs
from slipstream.model.load import load_config
from slipstream.model.lora import AdapterOptions, resolve_targets
from slipstream.model.new_tokens import fit_vocabulary, new_token_ids, trainable_rows
from slipstream.model.tiled_mlp import tile_obstacle
from slipstream.recipe import Recipe
from slipstream.transform import packed_needs

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Target:
    """The device that would train."""

    device: Device
    rates: Ceilings
    free: float | None
    """Bytes free on it now; None for a device that is only described."""
    host: float | None
    """Bytes of host memory free on its machine, as training will find them; None where not known."""
    here: bool
    """Whether it is this machine's."""


@dataclass(frozen=True)
class Facts:
    """A model and data sets, measured."""

    model: Any
    """The model on meta tensors."""
    shape: ModelShape
    adapted: tuple[tuple[int, int], ...]
    """Inputs and outputs of each module that adapters go on; where there are none, of those that they would."""
    saved: int
    """Parameters of modules that ``adapter.modules_to_save`` trains whole."""
    lengths: Lengths
    """Tokens of each training document."""
    eval_lengths: Lengths | None
    account: dict[str, Any]
    packings: dict[tuple[Any, ...], tuple[PackingReport, Lengths]] = field(default_factory=dict, repr=False)
    """What packing made of the lengths, by what it was asked: ``packing_of`` keeps it for other predictions."""
    untiled: str | None = None
    """Why MLPs can't run in tiles, or None."""
    asked: tuple[Decision, Needs | None] | None = None
    """What ``packed`` gives, where the model was asked before."""
    rows: int = 0
    """Parameters of new tokens' rows, which are trained beside their matrices."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document, held-out ones too."""
        return max(int(lengths.max()) for lengths in (self.lengths, self.eval_lengths) if lengths is not None)

    @cached_property
    def packed(self) -> tuple[Decision, Needs | None]:
        """Whether the model can be trained packed, and what its attention then needs of a kernel; asked once."""
        return packed_needs(self.model) if self.asked is None else self.asked


def target(name: str | None) -> Target:
    """The device to plan for: this machine's where ``name`` is None, a known one, or one that ``doctor`` described.

    Raises ``InputError`` for a name that is neither.
    """
    if name is None:
        return this_machine()
    if Path(name).is_file():
        return _described(Path(name))
    device, rates = named_device(name)
    return Target(device, rates, None, None, here=False)


def this_machine() -> Target:
    """The first card, else the CPU, with its ceilings (measured in a few seconds where they never were)."""
    name = "cuda" if torch.cuda.is_available() else "cpu"
    rates = ceilings(name, driver_version() if name == "cuda" else None)
    return Target(describe(name), rates, free_bytes(name), free_host_memory(), here=True)


def _described(path: Path) -> Target:
    """The device in a document that ``slipstream doctor --json`` wrote elsewhere."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        told, rates = found["devices"][0], found["ceilings"]
        told["compute_capability"] = told["compute_capability"] and tuple(told["compute_capability"])
        known = {item.name for item in fields(Device)}
        device = Device(**{name: value for name, value in told.items() if name in known})
        host = None if device.kind == "cpu" else float(found["host_memory"]["usable_bytes"])
        return Target(device, Ceilings(**rates), None, host, here=False)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise InputError(
            f"--device {path}: no device with ceilings in it ({type(error).__name__}: {error}); "
            "write it on that machine by 'slipstream doctor --json > that-machine.json'"
        ) from error


def skeleton(recipe: Recipe) -> Any:
    """The recipe's model without storage. Raises ``InputError`` where the model can't be found or is no causal one."""
    from transformers import AutoModelForCausalLM

    config = load_config(recipe.model, recipe.load)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=recipe.load.trust_remote_code)
    except (ValueError, RuntimeError, AssertionError) as error:  # what families and torch themselves refuse
        told = " ".join(str(error).split())
        raise InputError(
            f"model: no model can be made of the config of {recipe.model} ({told}); mend its config.json"
        ) from error


def with_new_tokens(recipe: Recipe, model: Any, tokenizer: Any) -> list[int]:
    """Give a model without storage room for every token, as training does; the tokens whose rows are learned."""
    tokens = new_token_ids(model, tokenizer, recipe.load.new_tokens)
    fit_vocabulary(model, tokenizer)
    return tokens


def shape_of(model: Any) -> ModelShape:
    """The shape of a model's configuration, with its weights counted on the model itself."""
    counted = sum(parameter.numel() for parameter in model.parameters())
    return replace(ModelShape.of(model.config), parameters=counted)


def facts(
    recipe: Recipe,
    model: Any,
    train: TokenisedSet,
    held_out: TokenisedSet | None,
    asked: tuple[Decision, Needs | None] | None = None,
    *,
    tokens: Sequence[int] = (),
) -> Facts:
    """The facts about a recipe's model and its tokenised data sets; ``tokens``: those whose rows are learned."""
    return Facts(
        model=model,
        shape=shape_of(model),
        adapted=adapted_sizes(recipe.adapter, model),
        saved=saved_whole(recipe.adapter, model),
        lengths=train.lengths,
        eval_lengths=None if held_out is None else held_out.lengths,
        account=train.account.as_json(),
        untiled=untiled(recipe.adapter, model),
        asked=asked,
        rows=learned_rows(recipe.adapter, model, tokens),
    )


def untiled(options: AdapterOptions, model: Any) -> str | None:
    """Why a model's MLPs can't run in tiles with this adapter, or None."""
    drops = options.kind == "lora" and options.dropout > 0
    drawing = [model.get_submodule(name) for name in resolve_targets(model, options)] if drops else []
    return tile_obstacle(checkpoint_layers(model), drawing)


def adapted_sizes(options: AdapterOptions, model: Any) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs of each module that adapters go on, as training resolves them; of those that they would go on
    by default, where all weights are trained.
    """
    modules = dict(model.named_modules())
    targets = resolve_targets(model, options if options.kind == "lora" else AdapterOptions())
    return tuple(_sizes(modules[name]) for name in targets)


def saved_whole(options: AdapterOptions, model: nn.Module) -> int:
    """Parameters of the modules that ``modules_to_save`` names."""
    patterns = [re.compile(rf"(^|\.){re.escape(wanted)}$") for wanted in options.modules_to_save]
    saved = (m for name, m in model.named_modules() if any(pattern.search(name) for pattern in patterns))
    return sum(parameter.numel() for module in saved for parameter in module.parameters())


def learned_rows(options: AdapterOptions, model: Any, tokens: Sequence[int]) -> int:
    """Parameters of the rows of ``tokens``, in each matrix of which they are trained."""
    rows = trainable_rows(model, tokens, options.modules_to_save) or {}
    return sum(len(ids) * _sizes(model.get_submodule(name))[0] for name, ids in rows.items())


def _sizes(module: nn.Module) -> tuple[int, int]:
    weight = module.get_parameter("weight")
    outputs, inputs = weight.shape
    return int(inputs), int(outputs)
