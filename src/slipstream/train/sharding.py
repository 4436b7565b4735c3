"""Weights, gradients and optimizer state divided over ranks (PyTorch's FSDP2), for what one device can't hold.

Each decoder layer is gathered when its turn comes and given back after; what comes before and after the layers is
gathered at the start of a step and kept, since the loss calls the output head by itself, after the model's forward.
Weights travel in the dtype that is computed in, gradients are summed in float32.

A checkpoint holds whole tensors, as one process would write it: the first rank collects them in host memory. Trade-off:
that rank needs host memory for all trained weights and their optimizer state (12 to 16 bytes a trained weight) while it
saves. Alternative: a file of each rank's share, which no other tool reads and no other number of ranks.

Every rank loads the whole model before it keeps its share, so the weights must fit one device once, as they are stored.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.transform import base_model

FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)


class Shards(nn.Module):
    """A divided model as a trainer calls it: not to be wrapped again, and gradients may wait for the last batch."""

    def __init__(self, module: nn.Module) -> None:
        """``module``: what `shard` gave."""
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The model's own."""
        return self.module(*arguments, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the context gradients stay whole on each rank, and are added to."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)


def shard(model: nn.Module, compute_dtype: torch.dtype | None) -> Decision:
    """Divide ``model`` over all ranks, in place; it is computed in ``compute_dtype`` (None: in its weights' dtype).

    Raises ``InputError`` for a model that can't be divided.
    """
    layers, base, ranks = layers_to_divide(model), base_model(model), dist.get_world_size()
    # Inputs are not cast: what a layer is given holds `Segments`, which must stay the one object that keeps its bounds,
    # and autocast casts at each product as on one device.
    policy = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    device = next(base.parameters()).device.type
    how: dict[str, Any] = {"mesh": init_device_mesh(device, (ranks,)), "mp_policy": policy}
    for layer in layers:
        fully_shard(layer, **how)
    fully_shard(model, **how, reshard_after_forward=False)
    dtype = str(compute_dtype or base.dtype).removeprefix("torch.")
    reason = f"{len(layers)} layers, each divided over {ranks} ranks and gathered in {dtype} when its turn comes"
    return Decision("sharding", True, reason)


def layers_to_divide(model: nn.Module) -> list[nn.Module]:
    """The decoder layers; ``InputError`` where there are none by name, or weights are packed into other numbers."""
    base = base_model(model)
    packed = next((name for name, weight in base.named_parameters() if not weight.is_floating_point()), None)
    if packed is not None:
        raise InputError(
            f"train.sharding: {packed} holds quantised numbers, which can't be divided; set sharding: none (every "
            f"process then holds all weights), or load.quantize: none"
        )
    kinds = set(base._no_split_modules or ())
    layers = [module for module in base.modules() if type(module).__name__ in kinds]
    if not layers:
        raise InputError(f"train.sharding: {type(base).__name__} names no layers to divide it by; leave sharding: none")
    return layers


def is_divided(model: nn.Module) -> bool:
    """Whether `shard` has divided the model."""
    return isinstance(model, FSDPModule)


def give_back(model: nn.Module) -> None:
    """Give back what a forward without backward has left gathered: an optimizer must see the shares."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The trained weights, whole and on the host, on the first rank; empty on the others. All ranks must call it.

    A weight of several names (an embedding that is the head's own, too) is there under each, and collected once.
    """
    shares: dict[str, Any] = get_model_state_dict(model)
    parameters, first = dict(model.named_parameters(remove_duplicate=False)), dist.get_rank() == 0
    whole: dict[int, Any] = {}
    weights: dict[str, Any] = {}
    # PyTorch's own way to leave out frozen weights leaves out one of their names, and collects the others.
    for name, share in shares.items():
        parameter = parameters.get(name)
        if parameter is not None and not parameter.requires_grad:
            continue
        key = id(share if parameter is None else parameter)
        if key not in whole:
            tensor = share.full_tensor() if isinstance(share, DTensor) else share
            whole[key] = tensor.cpu() if first else None
        weights[name] = whole[key]
    return weights if first else {}


def load_weights(model: nn.Module, weights: dict[str, Any]) -> None:
    """Put whole weights of the first rank (the others give none) where they belong; those not given stay.

    A weight of several names is put by its first: of a module that hangs in two places PyTorch divides one only.
    """
    firsts = {name for name, _ in model.named_parameters()}
    others = {name for name, _ in model.named_parameters(remove_duplicate=False)} - firsts
    once = {name: weight for name, weight in weights.items() if name not in others}
    set_model_state_dict(model, once, options=FROM_FIRST)


def whole_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by name of weight, whole and on the host, on the first rank. All ranks must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    return state


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put `whole_optimizer`'s state of the first rank (the others give none) back."""
    set_optimizer_state_dict(model, optimizer, state, options=FROM_FIRST)
