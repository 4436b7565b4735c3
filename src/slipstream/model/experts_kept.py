"""The forward's routing kept for the recompute, so that a recomputed layer takes the same experts.

A recompute that routes again may decide a near-tie otherwise (a kernel that rounds differently is enough): then it
saves tensors of other shapes than the forward, or none fails and the gradients belong to other experts. Here each
checkpointed layer's ``topk`` inside its mixture block is looked at: the forward keeps the chosen indices and the
recompute takes them. In both passes the values are gathered by the indices, so that both save the same tensors and
gradients flow as the model defines them.

The block's ``forward`` is overridden on the instance and watches ``topk`` only while a checkpointed layer runs.
Alternatives that fail: the experts registry is called after the router, too late; PyTorch's selective checkpointing of
``topk`` breaks where a model normalises the chosen values in place, or gives wrong gradients there.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""What ``torch.utils.checkpoint.checkpoint`` takes: contexts for one forward and for its recompute."""


@dataclass
class _Pass:
    """One run through a checkpointed layer."""

    kept: list[torch.Tensor]
    """The indices of each ``topk``, in the order of the calls."""
    recompute: bool
    at: int = 0

    def indices(self, choose: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What this call of ``topk`` chooses: anew in the forward, as then in the recompute."""
        if not self.recompute:
            self.kept.append(choose())
        self.at += 1
        return self.kept[self.at - 1]


@dataclass
class KeptRouting:
    """Watches the mixture blocks of one model; ``attach`` and ``detach`` are each called once."""

    blocks: list[nn.Module]
    current: _Pass | None = None
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
        return self._running(kept, recompute=False), self._running(kept, recompute=True)

    def _running(self, kept: list[torch.Tensor], *, recompute: bool) -> AbstractContextManager[Any]:
        return _Reentered(lambda: self._run(kept, recompute))

    @contextmanager
    def _run(self, kept: list[torch.Tensor], recompute: bool) -> Iterator[None]:
        outer, self.current = self.current, _Pass(kept, recompute)
        try:
            yield
        finally:
            self.current = outer

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.current is None:
                return forward(*args, **kwargs)
            with _Watch(self.current):
                return forward(*args, **kwargs)

        return watched


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
    """Answers ``topk`` with the indices of the pass at hand."""

    def __init__(self, current: _Pass) -> None:
        super().__init__()
        self._current = current

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk and func is not torch.Tensor.topk:
            return func(*args, **kwargs)
        return _kept_topk(self._current, *args, **kwargs)


def _kept_topk(current: _Pass, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    indices = current.indices(lambda: torch.topk(input.detach(), *args, **kwargs).indices)
    return torch.return_types.topk((input.gather(dim, indices), indices))
