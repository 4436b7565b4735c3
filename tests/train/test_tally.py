"""A trainer's step that is begun again counts, and learns, once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloading import LAYERS, deep, offloaded
from packed import with_adapter
from slipstream import apply
from slipstream.memory.checkpointing import restore_checkpointing
from slipstream.memory.held import Held
from slipstream.step import second_try
from slipstream.train.records import StepLog, read_records
from slipstream.transform import applied, base_model
from training import trainer_of

FAILING = 3 * LAYERS + 3
"""Of the inputs that layers ask for: in the second batch's backward, when some layers have added their gradients."""


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, failing: int | None) -> tuple[list[Any], list[torch.Tensor]]:
    """Two steps of two batches each: their records, and the adapter."""
    torch.manual_seed(0)
    model = apply(with_adapter(deep()).train())
    restore_checkpointing(applied(model).checkpointing)  # which would undo what is offloaded here
    calls, real = [], Held.take

    def take(held: Held) -> torch.Tensor:
        calls.append(held)
        if len(calls) == failing:
            raise torch.OutOfMemoryError("out of memory")
        return real(held)

    with offloaded(base_model(model), buffers=3) as made, monkeypatch.context() as patch:
        patch.setattr(Held, "take", take)
        found = SimpleNamespace(checkpointing=SimpleNamespace(offload=made.offload))
        patch.setattr(second_try, "applied", lambda model: found)
        log = StepLog(folder / "steps.jsonl")
        trainer_of(folder, model, step_log=log, max_steps=2, gradient_accumulation_steps=2).train()
        assert len(calls) == 4 * 2 * LAYERS + (0 if failing is None else LAYERS + 3)
        assert made.lane.most == (3 if failing is None else 1)
    return read_records(folder).steps, [p for p in model.parameters() if p.requires_grad]


def test_a_step_begun_again_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, weights = trained(tmp_path / "whole", monkeypatch, None)
    found, ours = trained(tmp_path / "again", monkeypatch, FAILING)
    assert len(expected) == 2
    for record, wanted in zip(found, expected, strict=True):
        for name in ("tokens", "documents", "padding_tokens", "learned_tokens", "loss", "grad_norm"):
            assert getattr(record, name) == pytest.approx(getattr(wanted, name)), name
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(ours, weights, strict=True))
