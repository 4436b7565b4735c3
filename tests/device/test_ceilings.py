"""Ceilings measured on this machine's CPU, and kept until something that they depend on changes."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from slipstream.cost.ceilings import Ceilings
from slipstream.cost.hardware import Device
from slipstream.device import ceilings as module
from slipstream.device.ceilings import ceilings, measure

RATES = Ceilings("float32", 2e11, 2e10, None, None, None, 5e-6, 0.0, "measured")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Counts measurements; each is a little faster than the one before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen: list[int] = []

    def faster(device: torch.device) -> Ceilings:
        seen.append(1)
        return replace(RATES, matmul=2e11 + len(seen))

    monkeypatch.setattr(module, "measure", faster)
    return seen


def test_measuring_a_cpu() -> None:
    found = measure("cpu", seconds=0.01)
    assert found.dtype in ("float32", "bfloat16")
    assert 1e8 < found.matmul < 1e14
    assert 1e8 < found.copy < 1e13
    assert 1e-8 < found.launch < 1e-2
    assert (found.to_device, found.to_host, found.pageable, found.sync) == (None, None, None, 0.0)
    assert found.source == "measured"


def test_a_card_is_measured_once(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    card = Device("cuda", "a card", 2**34, (9, 0), bf16=True, unified_memory=False)
    monkeypatch.setattr(module, "describe", lambda device: card)
    first = ceilings("cuda", None)
    assert ceilings("cuda", None) == first
    assert len(measured) == 1
    assert ceilings("cuda", None, fresh=True) != first
    assert ceilings("cuda", None).matmul == 2e11 + 2


def test_of_a_cpu_the_best_is_kept(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy minute does not last."""
    assert ceilings("cpu", None).matmul == 2e11 + 1
    assert ceilings("cpu", None).matmul == 2e11 + 2
    slow = replace(RATES, matmul=5e10, copy=9e10, launch=1e-3)
    monkeypatch.setattr(module, "measure", lambda device: slow)
    assert ceilings("cpu", None) == replace(RATES, matmul=2e11 + 2, copy=9e10)
    assert ceilings("cpu", None, fresh=True) == slow


def test_another_driver_or_torch_measures_anew(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings("cpu", None)
    ceilings("cpu", "590.1")
    assert len(measured) == 2
    monkeypatch.setattr(module.torch, "__version__", "9.9")
    ceilings("cpu", "590.1")
    assert len(measured) == 3


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"matmul": 1.0}', json.dumps({**asdict(RATES), "matmul": None})], ids=str
)
def test_a_damaged_file_is_measured_again(measured: list[int], tmp_path: Path, text: str) -> None:
    ceilings("cpu", None)
    (place,) = (tmp_path / "slipstream" / "ceilings").iterdir()
    place.write_text(text)
    ceilings("cpu", None)
    assert len(measured) == 2
    assert json.loads(place.read_text())["source"] == "measured"


def test_a_cache_that_cannot_be_written_costs_seconds_only(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert ceilings("cpu", None).matmul == 2e11 + 1
    assert ceilings("cpu", None).matmul == 2e11 + 2
