"""A tiny model whose layer inputs are offloaded, on the CPU or on any stand-in for a device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from late import LateTransfers
from packed import gradients, model_of
from slipstream.cost.offload import Split
from slipstream.decision import Decision
from slipstream.memory.checkpointing import restore_checkpointing, set_checkpointing
from slipstream.memory.host_budget import HostBudget
from slipstream.memory.offload import Offload

LAYERS = 5
IDS = torch.arange(5, 29)[None]


def deep(family: str = "llama", **settings: Any) -> Any:
    return model_of(family, **{"num_hidden_layers": LAYERS, **settings})


class Offloaded:
    """What a test looks at: the offload, its stand-in for a device, and the decisions taken on the way."""

    def __init__(self, buffers: Any, pool_bytes: int, strict: bool, split: Split, transfers: Any) -> None:
        self.notes: list[Decision] = []
        self.device = transfers
        self.split = split
        self.offload = Offload(
            layers=split.offloaded,
            buffers=buffers,
            host=HostBudget(pool_bytes),
            strict=strict,
            decide=self.notes.append,
            transfers=lambda device: transfers,
        )

    @property
    def lane(self) -> Any:
        (lane,) = self.offload.lanes.values()
        return lane


@contextmanager
def offloaded(
    model: Any,
    *,
    split: Split | None = None,
    buffers: Any = 2,
    pool_bytes: int = 2**30,
    strict: bool = True,
    transfers: Any = None,
    context_fn: Any = None,
) -> Iterator[Offloaded]:
    """``model`` with its layer inputs offloaded, all but the last, to copies that come late."""
    split = split or Split(0, 1, model.config.num_hidden_layers - 1)
    made = Offloaded(buffers, pool_bytes, strict, split, transfers or LateTransfers())
    undo = set_checkpointing(model, split, decide=made.notes.append, offload=made.offload, context_fn=context_fn)
    try:
        yield made
    finally:
        restore_checkpointing(undo)


def plain(model: Any) -> Any:
    """``model`` with every layer recomputed, as it is without offload."""
    set_checkpointing(model, Split(0, model.config.num_hidden_layers, 0), decide=[].append)
    return model


def loss_of(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits.float().square().mean()


def step(model: Any, run: Callable[[Any], None] | None = None) -> dict[str, torch.Tensor]:
    """The gradients of one step, or of whatever ``run`` does."""
    model.zero_grad(set_to_none=True)
    if run is None:
        loss_of(model).backward()
    else:
        run(model)
    return gradients(model)


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert any(gradient.abs().max() > 0 for gradient in theirs.values())
    assert [name for name, gradient in theirs.items() if not torch.equal(ours[name], gradient)] == []
