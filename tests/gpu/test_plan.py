"""On a card: its ceilings, a prediction beside a short run, and one step's timeline."""

import json
from pathlib import Path

import pytest
import torch

from slipstream.device.ceilings import ceilings, measure
from slipstream.plan.facts import this_machine
from slipstream.train.timeline import FILE, StepTimeline
from training import packed_rows, trainer_of

pytestmark = pytest.mark.gpu


def test_ceilings_are_a_cards() -> None:
    found = measure("cuda", seconds=0.05)
    assert 1e12 < found.matmul < 5e15
    assert 5e10 < found.copy < 2e13
    assert 1e-6 < found.launch < 1e-3
    assert found.sync > 0
    assert found.to_device is None or found.pageable is None or found.pageable < 1.2 * found.to_device
    assert torch.cuda.max_memory_allocated() < 2**20 * 512  # what was measured with is given back


def test_ceilings_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ceilings("cuda", "1") == ceilings("cuda", "1")
    assert this_machine().device.kind == "cuda"


def test_a_step_is_sampled(tmp_path: Path) -> None:
    trainer_of(
        tmp_path / "out", callbacks=[StepTimeline(tmp_path, sampled=3)], train_dataset=packed_rows(), use_cpu=False
    ).train()
    found = json.loads((tmp_path / FILE).read_text())
    assert found["step"] == 3
    assert found["events"]["compute"] > 10
    assert found["events"]["launches"] > 0
