"""Where plans are made in tests: caches of their own, and a machine without a card."""

from pathlib import Path

import datasets
import pytest

from planning import CPU, CPU_RATES, GIB
from slipstream.plan import facts


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


@pytest.fixture
def cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(facts, "ceilings", lambda device, driver: CPU_RATES)
    monkeypatch.setattr(facts, "describe", lambda device: CPU)
    monkeypatch.setattr(facts, "free_bytes", lambda device: 8 * GIB)
