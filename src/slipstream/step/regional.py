"""Decoder layers compiled once and shared: their elementwise work in few kernels.

All layers of a model run the same code on other weights, so one compiled function serves them all, and the time to
compile does not grow with depth. Attention stays outside: it is called between compiled parts as it is, so that each
kernel choice works and boundaries never become constants of compiled code. Compiled layers are in place only inside
``active``: evaluation and generation, whose shapes differ, run the model's own. The alternative, compiling the whole
model, takes minutes for deep models and compiles again for each set of boundaries. An MLP that runs in tiles
(``model/tiled_mlp.py``) is a compiled part of its own.

Between compiled parts nothing is copied: a part's backward is traced for gradients laid out as its outputs are, which
is how attention kernels give those of the queries, keys and values that they read.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from slipstream.model.attention import register_attention
from slipstream.model.tiled_mlp import tiled_mlps

LARGEST_VARIETY = 256
"""How many variants of one function may be compiled before it is an error. A model needs about ten; other models of the
process that have the same layer class count, too."""


class CompiledLayers:
    """The decoder layers and the last norm of one model, compiled."""

    def __init__(self, decoder: nn.Module) -> None:
        """``decoder``: a transformers decoder; layers with a forward of their own on the instance are left alone."""
        register_attention(outside_graphs=True)
        self._forwards: dict[type, Any] = {}
        self._modules = [module for module in _repeated(decoder) if "forward" not in vars(module)]
        self._tiles = tiled_mlps(decoder)
        for kind in {*map(type, self._modules), *(type(tile.module) for tile in self._tiles)}:
            self._forwards[kind] = _compiled(kind)

    def __len__(self) -> int:
        return len(self._modules)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the layers compiled inside this context."""
        import torch._dynamo

        for module in self._modules:
            vars(module)["forward"] = MethodType(self._forwards[type(module)], module)
        for tile in self._tiles:
            tile.compiled = MethodType(self._forwards[type(tile.module)], tile.module)
        try:
            with (
                _gradients_laid_out_as_outputs(),
                torch._dynamo.config.patch(
                    recompile_limit=LARGEST_VARIETY,
                    accumulated_recompile_limit=4 * LARGEST_VARIETY,
                    fail_on_recompile_limit_hit=True,
                ),
            ):
                yield
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"a layer was compiled {LARGEST_VARIETY} times, each time for something that differs"
            ) from error
        finally:
            for module in self._modules:
                vars(module).pop("forward", None)
            for tile in self._tiles:
                tile.compiled = None


def _compiled(kind: Any) -> Callable[..., Any]:
    """A layer class's forward, compiled; checkpointing stays outside, as what moves its inputs can't be traced.

    From transformers 5.20 or so on the class's forward is a wrapper that checkpoints; before, ``__call__`` does.
    """
    code = getattr(kind.forward, "__code__", None)
    if code is None or code.co_name != "forward_with_checkpointing":
        return torch.compile(kind.forward, dynamic=False)
    inner: Callable[..., Any] = torch.compile(kind.forward.__wrapped__, dynamic=False)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(partial(inner, self, **kwargs), *args)
        return inner(self, *args, **kwargs)

    return forward


def _gradients_laid_out_as_outputs() -> AbstractContextManager[Any]:
    """What is compiled inside takes the gradients of its outputs in their strides, as newer PyTorch does by itself.

    PyTorch 2.11 traces contiguous ones by default and copies at run time what comes otherwise; queries, keys and values
    are transposed, so that each of their gradients would be copied once a layer.
    """
    import torch._functorch.config as config

    option = "guess_tangent_strides_as_outputs"
    patched: AbstractContextManager[Any] = config.patch({option: True}) if hasattr(config, option) else nullcontext()
    return patched


def _repeated(decoder: Any) -> list[nn.Module]:
    """The decoder's layers, and the norm behind them."""
    layers = [module for module in decoder.layers if isinstance(module, nn.Module)]
    norm = getattr(decoder, "norm", None)
    return [*layers, norm] if isinstance(norm, nn.Module) else layers
