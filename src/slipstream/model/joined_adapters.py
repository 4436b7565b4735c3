"""Which adapter layers read one tensor, so that compiled layers compute them together (``adapted_products.py``).

Queries, keys and values of a layer read the same norm's output; so do an MLP's gate and up. A model calls them one by
one, and they stay modules of their own: the first that is called computes all of its group, and the others find their
outputs ready, if they are called with the very same tensor. Which layers read one tensor is seen in a forward of a few
tokens, not concluded from names: a model whose layers share keys has some that it never calls.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.model.adapted_products import adapted_products

TRIED = 4
"""Tokens of the forward in which inputs are compared."""


@dataclass(eq=False)
class Joined:
    """Adapter layers of one module that read the same tensor, in the order in which they are called."""

    layers: list[Any]
    names: list[str]
    """Each layer's adapter."""
    halves: str
    """The attribute of a layer that has its half-precision copies (A, B)."""
    ready: tuple[torch.Tensor, list[torch.Tensor]] | None = None
    """What all were computed from, and their outputs, until the last is fetched; None between two forwards."""

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The output of the layer at ``index`` for its input ``x``."""
        if index > 0:
            ready = self.ready
            if ready is None or ready[0] is not x:
                return self._computed(index, index + 1, x)[0]
            if index == len(self.layers) - 1:
                self.ready = None
            return ready[1][index]
        outs = self._computed(0, len(self.layers), x)
        if len(outs) > 1:
            self.ready = x, outs
        return outs[0]

    def _computed(self, first: int, end: int, x: torch.Tensor) -> list[torch.Tensor]:
        members = self.layers[first:end]
        copies = [vars(layer)[self.halves] for layer in members]
        return adapted_products(
            x,
            [layer.base_layer.weight for layer in members],
            [layer.base_layer.bias for layer in members if layer.base_layer.bias is not None],
            [a_RI for a_RI, _ in copies],
            [b_OR for _, b_OR in copies],
            [layer.scaling[name] for layer, name in zip(members, self.names[first:end], strict=True)],
        )


def can_be_joined(layer: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether ``adapted_products`` gives what an adapter layer with frozen weights in ``dtype`` does: no dropout before
    the adapter, and nothing of the base layer's own but weight and bias.
    """
    base, dropout = layer.get_base_layer(), layer.lora_dropout[name]
    if type(base) is not nn.Linear or "forward" in vars(base) or base._forward_hooks or base._forward_pre_hooks:
        return False
    parameters = [base.weight, *([] if base.bias is None else [base.bias])]
    plain = all(type(p) is nn.Parameter and p.dtype == dtype and not p.requires_grad for p in parameters)
    return plain and (isinstance(dropout, nn.Identity) or dropout.p == 0)


def same_inputs(base: Any, layers: Sequence[nn.Module], dtype: torch.dtype) -> list[list[nn.Module]]:
    """``layers`` in groups: those of one module that are called with the very same tensor, one after the other.

    Runs a transformers model once on a few tokens, without gradients, under autocast in ``dtype`` as a step does. Each
    layer is in one group, most of them alone; a layer that is called more or less than once is.
    """
    parents = {module: name.rpartition(".")[0] for name, module in base.named_modules()}
    calls = _calls(base, layers, dtype)
    once = {layer for layer, count in Counter(layer for layer, _ in calls).items() if count == 1}
    groups = [[layer] for layer in layers if layer not in once]
    before: tuple[object, ...] | None = None
    for layer, x in calls:
        if layer not in once:
            continue
        key = parents[layer], id(x), _kind(layer)
        if key == before:
            groups[-1].append(layer)
        else:
            groups.append([layer])
        before = key
    return groups


def _kind(layer: Any) -> tuple[object, ...]:
    """What layers of one product have in common."""
    base = layer.get_base_layer()
    return base.in_features, base.weight.device, base.bias is None


@torch.no_grad()
def _calls(base: Any, layers: Sequence[nn.Module], dtype: torch.dtype) -> list[tuple[nn.Module, torch.Tensor]]:
    """Which layers are called with which tensors; these are kept, so that no two of them have one address."""
    calls: list[tuple[nn.Module, torch.Tensor]] = []

    def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
        if args:  # a layer that is called by keywords alone computes by itself
            calls.append((layer, args[0]))

    device = next(base.get_input_embeddings().parameters()).device
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with _evaluating(base), torch.autocast(device.type, dtype=dtype, cache_enabled=False):
            base(input_ids=torch.ones((1, TRIED), dtype=torch.int64, device=device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@contextmanager
def _evaluating(base: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; then each module is in the mode it was in, which need not be its parent's."""
    training = [module for module in base.modules() if module.training]
    base.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
