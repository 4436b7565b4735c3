"""The script that measures scaling: it runs on two processes of the CPU, and its arithmetic on kernels is right."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/bench_scaling.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("bench_scaling", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("spans", "exposed"),
    [
        ([(0.0, 4.0, False), (2.0, 7.0, True), (6.0, 9.0, True)], 5.0),
        ([(0.0, 9.0, False), (2.0, 7.0, True)], 0.0),
        ([(0.0, 1.0, False), (2.0, 4.0, True), (3.0, 5.0, False), (8.0, 9.0, True)], 2.0),
        ([], 0.0),
    ],
)
def test_exposed_is_what_no_other_kernel_covers(spans: list[tuple[float, float, bool]], exposed: float) -> None:
    assert script().uncovered(spans) == exposed


def test_two_processes_are_measured(tmp_path: Path) -> None:
    """The run asserts by itself that ranks took the same steps and learned from every token once."""
    out = tmp_path / "scaling.json"
    command = [sys.executable, str(SCRIPT), "--processes", "2", "--steps", "2", "--layers", "2", "--out", str(out)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    (run,) = document["runs"]
    assert run["processes"] == 2
    assert run["exposed_communication_ms"]["against silent ranks"] is not None
    assert len(run["step_ms_each_step"]) == 2
    assert len(run["host_peak_gb"]) == 2
    assert min(run["host_peak_gb"]) > 0.1
    assert any("2 processes, each with all weights" in decision for decision in run["decisions"])
    assert json.loads(done.stdout.splitlines()[-1]) == document["summary"]
    assert str(tmp_path) not in json.dumps(document)
