"""The forward's routing kept for the recompute, so that a recomputed layer takes the same experts, sorted once.

A recompute that routes again may decide a near-tie otherwise (a kernel that rounds differently is enough): then it
saves tensors of other shapes than the forward, or none fails and the gradients belong to other experts. Here each
checkpointed layer's ``topk`` inside its mixture block is looked at: the forward keeps the chosen indices and the
recompute takes them. In both passes the values are gathered by the indices, so that both save the same tensors and
gradients flow as the model defines them. What was sorted by these indices is kept beside them, some 20 bytes an
assignment, so that an uncompiled layer sorts (or asks the device for its experts' counts) once and not twice.

The block's ``forward`` is overridden on the instance and watches ``topk`` only while a checkpointed layer runs, or is
compiled. A compiled layer chooses in an operator of its own (``slipstream::choose``), which is opaque to the compiler:
forward and recompute must be one graph, so what differs is looked up when it runs. (Where somebody compiles
a layer with its checkpoint, the graph itself recomputes, and the checkpoint function has it keep what was chosen:
``memory/checkpointing.py``.) Alternatives that fail in eager mode:
the experts registry is called after the router, too late; PyTorch's selective checkpointing of ``topk`` breaks where a
model normalises the chosen values in place, or gives wrong gradients there.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slipstream.model.routing import Routing, route

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""What ``torch.utils.checkpoint.checkpoint`` takes: contexts for one forward and for its recompute."""


@dataclass
class _Pass:
    """One run through a checkpointed layer."""

    kept: list[torch.Tensor]
    """The indices of each ``topk``, in the order of the calls."""
    routings: dict[nn.Module, list[Routing]]
    """What each experts module sorted by them, in the order of its calls; nothing of compiled layers."""
    recompute: bool
    at: int = 0
    taken: Counter[nn.Module] = field(default_factory=Counter)
    """How many of a module's routings this recompute has taken."""


RUNNING: ContextVar[_Pass | None] = ContextVar("slipstream_running", default=None)
"""The pass at hand. An operator has no instance to look it up on; a context variable belongs to a thread, and autograd
recomputes in threads of its own."""


def _choose(scores: torch.Tensor, k: int, dim: int, largest: bool, in_order: bool) -> torch.Tensor:
    """``topk``'s indices: chosen anew, and kept, in a forward; those kept, in its recompute."""
    current = RUNNING.get()
    if current is not None and current.recompute:
        current.at += 1
        return current.kept[current.at - 1].clone()  # whoever gets it may write over it
    chosen = torch.topk(scores, k, dim, largest, in_order).indices
    if current is not None:
        current.kept.append(chosen.clone())
    return chosen


choose = torch.library.custom_op("slipstream::choose", _choose, mutates_args=())
choose.register_fake(lambda scores, k, dim, largest, in_order: torch.topk(scores, k, dim, largest, in_order).indices)


def kept_route(module: nn.Module, top_k_index_TK: torch.Tensor, experts: int) -> Routing:
    """``routing.route`` for one experts module; in a recompute, what its forward has made."""
    current = None if torch.compiler.is_compiling() else RUNNING.get()
    if current is None:
        return route(top_k_index_TK, experts)
    made = current.routings.setdefault(module, [])
    if not current.recompute:
        made.append(route(top_k_index_TK, experts))
        return made[-1]
    current.taken[module] += 1
    # nothing is there where the forward was compiled and its recompute is not
    return made[current.taken[module] - 1] if made else route(top_k_index_TK, experts)


@dataclass
class KeptRouting:
    """Watches the mixture blocks of one model; ``attach`` and ``detach`` are each called once."""

    blocks: list[nn.Module]
    own: list[tuple[nn.Module, Any]] = field(default_factory=list)
    """Blocks with a ``forward`` of their own on the instance, and that."""

    def attach(self) -> None:
        """Override the blocks' forward."""
        for block in self.blocks:
            self.own += [(block, vars(block)["forward"])] if "forward" in vars(block) else []
            block.forward = self._watched(block.forward)

    def detach(self) -> None:
        """Put the blocks' forward back."""
        for block in self.blocks:
            vars(block).pop("forward", None)
        for block, forward in self.own:
            block.forward = forward

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The ``context_fn`` of a checkpoint: for one layer's forward, and for its recompute."""
        kept: list[torch.Tensor] = []
        routings: dict[nn.Module, list[Routing]] = {}
        return _Reentered(lambda: _run(kept, routings, False)), _Reentered(lambda: _run(kept, routings, True))

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or RUNNING.get() is not None:
                with _Watch():
                    return forward(*args, **kwargs)
            return forward(*args, **kwargs)

        return watched


@contextmanager
def _run(kept: list[torch.Tensor], routings: dict[nn.Module, list[Routing]], recompute: bool) -> Iterator[None]:
    before = RUNNING.set(_Pass(kept, routings, recompute))
    try:
        yield
    finally:
        RUNNING.reset(before)


class _Reentered(AbstractContextManager[Any]):
    """A context that may be entered again: a graph kept for a second backward recomputes again."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._inner: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._inner.append(self._make())
        self._inner[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inner.pop().__exit__(*error)


class _Watch(TorchFunctionMode):
    """Answers ``topk`` with the indices that the pass at hand chooses, and the values by these."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.topk or func is torch.Tensor.topk:
            return _chosen_topk(*args, **kwargs)
        return func(*args, **kwargs)


def _chosen_topk(input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """``torch.topk`` by its own names."""
    pick = choose if torch.compiler.is_compiling() else _choose  # which is quicker, and as good outside a graph
    indices = pick(input.detach(), k, dim, largest, sorted)
    return torch.return_types.topk((input.gather(dim, indices), indices))
