"""The script that sets a plan beside a run: a whole row, on the CPU."""

import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slipstream.cost.ceilings import Ceilings
from slipstream.cost.hardware import Device
from slipstream.plan.facts import Target

SCRIPT = Path(__file__).parents[2] / "benchmarks/bench_plan.py"
HOST = Target(
    Device("cpu", "a host", 2**36, None, bf16=False, unified_memory=True),
    Ceilings("float32", 3e10, 1e10, None, None, None, 5e-6, 1e-6, "measured"),
    free=None,
    host=None,
    here=False,
)


def script() -> Any:
    spec = importlib.util.spec_from_file_location("bench_plan", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("recorded", [0, 1])
def test_a_row(recorded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are what lies between two ends; those that recorded a graph count for nothing but their number."""
    from slipstream.bench import step_clock

    if recorded:  # as if the last but one had
        monkeypatch.setattr(step_clock.StepClock, "recorded", lambda _: [False, False, False, True, False])
    asked = Namespace(shape="tiny", tokens=64, layers=2, activations="keep", mode="eager", nf4=False, steps=6)
    row = script().compared(asked, HOST)
    assert len(row["steps"]) == asked.steps - 1
    assert row["steps_timed"] == 2 - recorded
    assert row["recordings"] == 0
    kept = row["steps"][asked.steps - 3 + recorded :]
    assert row["measured_seconds"] == pytest.approx(sum(kept) / len(kept), abs=1e-4)
    assert row["predicted_seconds"] > 0
    assert row["choices"] == "2 kept; eager; sdpa"


def test_a_row_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"device_bytes": 2_000, "step_seconds": 6.5, "floor_seconds": 2.9}
    decisions = [{"name": "step", "reason": "eager: CUDA graphs need a card"}, {"name": "attention", "reason": "sdpa"}]
    recipe = {"model": "models/small.gguf", "packing": {"tokens": 768}, "output": "runs/demo"}
    steps = [Namespace(seconds=seconds, memory_bytes=None) for seconds in (20.0, 7.0, 8.0, 30.0)]
    records = Namespace(run={"plan": plan, "recipe": recipe, "decisions": decisions}, steps=steps)
    monkeypatch.setattr("slipstream.train.records.read_records", lambda _: records)
    row = script().recorded(Path("runs/demo"))
    assert row["shape"] == "small, demo"
    assert row["choices"] == "eager; sdpa"
    assert (row["predicted_seconds"], row["measured_seconds"], row["steps_timed"]) == (6.5, 8.0, 3)
    assert row["measured_bytes"] is None
    records.run["plan"] = {"missing": "its sizes"}
    with pytest.raises(SystemExit, match="its sizes"):
        script().recorded(Path("runs/demo"))
