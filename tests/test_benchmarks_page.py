"""The benchmark page is what its generator writes, and the generator shows files it has never seen."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def generator() -> Any:
    spec = importlib.util.spec_from_file_location("benchmarks_page", ROOT / "benchmarks" / "page.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_regenerating_changes_nothing(generator: Any) -> None:
    assert generator.main(["--check"]) == 0, "run python benchmarks/page.py"


def test_a_changed_result_is_noticed(generator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = generator.read_results(generator.RESULTS)
    assert results
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**result, "device": "another"}))
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    assert generator.main(["--check"]) == 1


def test_every_file_is_named_with_where_it_comes_from(generator: Any) -> None:
    text = generator.PAGE.read_text(encoding="utf-8")
    for name, result in generator.read_results(generator.RESULTS).items():
        assert f"`{name}`" in text
        assert result["command"] in text
        assert result["commit"][:12] in text


def test_our_rows_stand_beside_the_published_ones(generator: Any) -> None:
    offload = {
        "benchmark": "offload",
        "rows": [
            {
                "shape": "qwen3-8b",
                "layers": 8,
                "arms": {
                    "offload-1": {"seconds": {"whole": [2.0, 3.0, 4.0]}, "peak_bytes": 20_000_000_000},
                    "offload-2": {"seconds": {"whole": [2.0]}, "peak_bytes": 20_400_000_000},
                },
                "comparisons": [
                    {"arm": "offload-2", "against": "recompute", "part": "whole", "ratio": 1.5, "saved_seconds": 9.0},
                    {"arm": "offload-2", "against": "offload-1", "part": "whole", "ratio": 0.8, "saved_seconds": 0.5},
                ],
            },
            {"shape": "qwen3-8b", "part": "longest", "tokens": 100_000, "fits": True},
        ],
    }
    text = generator.page({"offload_x": offload})
    line = next(line for line in text.splitlines() if line.startswith("| 8B dense"))
    assert line.endswith("| +25.00% | 0.40 GB | 500 ms |")
    assert "| 14B dense | 0.2245 → 0.2395 | +6.70% | 0.47 GB | 279 ms | – | – | – |" in text
    assert "| offload-1 | 20.00 GB | 3000 ms |" in text
    assert "| qwen3-8b | longest | 100,000 | yes |" in text


def test_predictions_stand_with_their_errors(generator: Any) -> None:
    row = {
        "shape": "qwen3-8b",
        "layers": 36,
        "tokens": 8192,
        "choices": "recompute, captured",
        "predicted_bytes": 22e9,
        "measured_bytes": 20e9,
        "predicted_seconds": 0.7,
        "measured_seconds": None,
    }
    text = generator.page({"plan_x": {"benchmark": "plan", "rows": [row]}})
    assert (
        "| plan_x | qwen3-8b | 36 | 8,192 | recompute, captured | 22.00 GB | 20.00 GB | +10% | 700 ms | – | – |" in text
    )


def test_an_unknown_benchmark_has_its_tables(generator: Any) -> None:
    unknown = {
        "benchmark": "step",
        "summary": {"captured": {"median_step_ms": 58.1, "peak_memory_gb": 8.7}, "ratio": 3.21},
        "rows": [{"name": "a|b", "seconds": 0.0123, "nested": {"x": 1}}, {"name": "c", "held": False}],
    }
    text = generator.page({"step_new": unknown})
    assert "## step: `step_new`" in text
    assert "device not recorded" in text
    assert "| captured | 58.1 ms | 8.70 GB |" in text
    assert "ratio: 3.21." in text
    assert "| a\\|b | 12.3 ms | – |" in text
    assert "| c | – | no |" in text


def test_modes_stand_with_what_ran(generator: Any) -> None:
    mode = {"ran": "compiled", "seconds": 0.1684, "tokens_per_second": 24330.4, "share_of_floor": 0.075}
    result = {"benchmark": "step", "rows": [{"shape": "tiny", "tokens": 64, "modes": {"captured": mode}}]}
    page = generator.section("step_tiny", result)
    assert "shape tiny, tokens 64." in page
    assert "| captured | compiled | 24,330 | 7.5% | 168 ms |" in page


def test_what_is_learned_stands_with_its_verdicts(generator: Any) -> None:
    facts = {"model": "small", "dtype": "bfloat16", "steps": 100, "tokens": 2048}
    mode = {"arm": "captured", "against": "eager", "largest": 0.00123, "mean": 0.0004, "gradient": 0.002}
    mode |= {"allowed_largest": 0.002, "allowed_mean": 0.001, "allowed_gradient": 0.0031, "within": True}
    modes = {"part": "modes", **facts, "arms": {"compiled": {"refused": "no compiler"}}, "comparisons": [mode]}
    curve = {"held_out": {"0": 2.0, "50": 1.7, "100": 1.51239}}
    verdict = {"arm": "slipstream", "against": "peft", "difference": -0.01, "relative": -0.006, "allowed": 0.02}
    verdict |= {"within": False}
    adapters = {"part": "adapters", **facts, "arms": {"slipstream": curve}, "comparisons": [verdict]}
    text = generator.page({"learning_x": {"benchmark": "learning", "rows": [modes, adapters]}})
    told = "| learning_x | small | bfloat16 | 100 |"
    assert f"{told} captured | 0.0012 | 0.0004 | 0.002 | 0.002, 0.001, 0.0031 | yes |" in text
    assert f"{told} compiled | – | – | – | – | left out: no compiler |" in text
    assert f"{told} slipstream | 2.0000 | 1.7000 | 1.5124 |" in text
    assert "| learning_x | slipstream | peft | -0.01 | -0.600% | 0.02 | no |" in text
    assert "What is learned" not in generator.page({})
