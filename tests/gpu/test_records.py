"""The step log on a card: no synchronising call while training, and the values are those the device had."""

from pathlib import Path

import pytest
import torch

from slipstream.train.records import StepLog, read_records

pytestmark = pytest.mark.gpu


def test_a_step_is_logged_without_a_sync(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    loss, grad_norm = torch.zeros((), device="cuda"), torch.zeros((), device="cuda", dtype=torch.bfloat16)
    busy = torch.randn(4096, 4096, device="cuda")

    def step(number: int) -> None:
        for _ in range(10):
            torch.mm(busy, busy)
        loss.fill_(number)  # overwritten every step, as a replayed graph does
        grad_norm.fill_(number / 2)
        host = {"step": number, "epoch": 0.0, "learning_rate": 1e-4, "tokens": 1, "learned_tokens": 1}
        scalars = {"loss": loss, "grad_norm": grad_norm}
        log.push(host | {"documents": 1, "padding_tokens": 0, "seconds": 0.1, "memory_bytes": None}, scalars)

    step(1)
    log.drain()
    torch.cuda.set_sync_debug_mode("error")
    with torch.profiler.profile() as profile:
        for number in range(2, 41):
            step(number)
        late = 40 - (log.last.step if log.last else 0)
    torch.cuda.set_sync_debug_mode("default")
    log.drain()
    calls = [event.key for event in profile.key_averages() if "Synchronize" in event.key]
    own = [key for key in calls if "DeviceSynchronize" not in key]  # the profiler's own, at its end
    assert own == []
    assert late > 0, "the host ran ahead of the device"
    assert log.waits == 0
    records = read_records(tmp_path).steps
    assert [(r.step, r.loss, r.grad_norm) for r in records] == [(n, n, n / 2) for n in range(1, 41)]


def test_a_full_ring_waits_and_loses_nothing(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    busy = torch.randn(4096, 4096, device="cuda")
    for number in range(1, 151):
        for _ in range(10):
            torch.mm(busy, busy)
        loss = torch.full((), float(number), device="cuda")
        host = {"step": number, "epoch": 0.0, "learning_rate": 1e-4, "tokens": 1, "learned_tokens": 1}
        log.push(host | {"documents": 1, "padding_tokens": 0, "seconds": 0.1}, {"loss": loss, "grad_norm": loss})
    log.drain()
    assert log.waits > 0
    assert [r.loss for r in read_records(tmp_path).steps] == list(range(1, 151))
