"""A trace becomes a few lanes of intervals; one step of a training is sampled."""

import json
from pathlib import Path
from typing import Any

from slipstream.train.timeline import FILE, MOST, StepTimeline, timeline
from training import trainer_of


def event(category: str, start: float, span: float, name: str = "k") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "ts": start, "dur": span, "name": name}


def test_lanes() -> None:
    events = [
        event("kernel", 1000.0, 500.0),
        event("kernel", 1200.0, 100.0),  # on another stream, inside the first
        event("kernel", 1600.0, 400.0),
        event("gpu_memcpy", 1000.0, 250.0),
        event("cuda_runtime", 900.0, 50.0, "cudaLaunchKernel"),
        event("cuda_runtime", 1900.0, 100.0, "cudaStreamSynchronize"),
        event("python_function", 0.0, 9e9),
        {"ph": "i", "cat": "kernel", "ts": 1.0, "name": "a mark"},
    ]
    found = timeline(events)
    assert found["milliseconds"] == 1.1
    assert found["lanes"]["compute"] == [[0.1, 0.5], [0.7, 0.4]]
    assert found["lanes"]["waits"] == [[1.0, 0.1]]
    assert found["busy"]["compute"] == round(0.9 / 1.1, 4)
    assert found["events"] == {"compute": 3, "copies": 1, "launches": 1, "waits": 1}


def test_many_events_become_few_intervals() -> None:
    found = timeline(event("kernel", 10.0 * n, 4.0) for n in range(20_000))
    spans = found["lanes"]["compute"]
    assert 1 <= len(spans) <= MOST
    assert found["events"]["compute"] == 20_000
    assert found["busy"]["compute"] == 0.4  # what was drawn together counts no more


def test_a_trace_without_events() -> None:
    assert timeline([{"ph": "M"}])["lanes"] == {}


def test_one_step_of_a_training_is_sampled(tmp_path: Path) -> None:
    trainer_of(tmp_path / "out", callbacks=[StepTimeline(tmp_path, sampled=2)]).train()
    found = json.loads((tmp_path / FILE).read_text())
    assert found["step"] == 2
    assert found["milliseconds"] > 0
    assert found["events"]["operators"] > 50


def test_a_training_that_ends_before_has_none(tmp_path: Path) -> None:
    trainer_of(tmp_path / "out", callbacks=[StepTimeline(tmp_path, sampled=9)]).train()
    assert not (tmp_path / FILE).exists()
