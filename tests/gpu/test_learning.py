"""The comparison of what is learned on a card: every mode runs as asked, and Slipstream learns what plain peft does."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parents[2] / "benchmarks/bench_learning.py"


@pytest.fixture(autouse=True)
def beside_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)  # as Python does for a script


def measured(tmp_path: Path, *words: str) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("bench_learning", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    data, out = tmp_path / "rows.jsonl", tmp_path / "result.json"
    rows = [{"prompt": f"What is {n} times {n}? ", "completion": f"It is {n * n}."} for n in range(200)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--model", "tiny", "--data", str(data), "--tokens", "256", "--steps", "10", "--every", "5"]
    assert module.main([*common, "--out", str(out), *words]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert not [name for name, arm in row["arms"].items() if "losses" not in arm and name != "eager-float32"], row[
        "arms"
    ]
    found: dict[str, Any] = row
    return found


@pytest.mark.parametrize(("dtype", "bar"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_modes_run_and_agree(tmp_path: Path, dtype: str, bar: float) -> None:
    row = measured(tmp_path, "--part", "modes", "--dtype", dtype)
    modes = {one["arm"]: one for one in row["comparisons"] if not one["arm"].startswith("eager")}
    assert {name: one["ran"] for name, one in modes.items()} == {"compiled": "compiled", "captured": "captured"}
    assert max(one["largest"] for one in row["comparisons"]) < bar
    assert max(one["gradient"] for one in row["comparisons"]) < bar


def test_the_default_learns_what_peft_learns(tmp_path: Path) -> None:
    row = measured(tmp_path, "--part", "adapters", "--dtype", "bfloat16")
    assert row["arms"]["slipstream"]["ran"] == "captured"
    ours, *_, exact = row["comparisons"]
    assert ours["comparable"]
    assert exact["comparable"]
    assert max(abs(ours["relative"]), abs(exact["relative"])) < 1e-3
