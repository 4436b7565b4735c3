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
        assert all(f"\n    {command}\n" in text for command in result["command"].split("; "))
        assert result["commit"][:12] in text


def test_our_rows_stand_beside_the_published_ones(generator: Any) -> None:
    offload = {
        "benchmark": "offload",
        "rows": [
            {
                "shape": "qwen3-8b",
                "tokens": 49_152,
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
    assert line.endswith("| 8 | +25.00% | 0.40 GB | 500 ms | `offload_x` |")
    assert "| 14B dense | 0.2245 → 0.2395 | +6.70% | 0.47 GB | 279 ms | – | – | – | – | – |" in text
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
        "| plan_x | – | qwen3-8b | 36 | 8,192 | recompute, captured | 22.00 GB | 20.00 GB | +10% | 700 ms | – | – |"
        in text
    )


def test_a_note_stands_with_the_result(generator: Any) -> None:
    text = generator.page({"step_x": {"benchmark": "step", "rows": [], "note": "measured on a slow host"}})
    assert "**measured on a slow host**" in text


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
    page = generator.section("step_tiny", {"step_tiny": result})
    assert "shape tiny, tokens 64." in page
    assert "| captured | compiled | 24,330 | 7.5% | 168 ms |" in page
    mode["decisions"] = ["half adapters: on (x)", "step: on (compiled: recording failed: a fault Search for advice)"]
    page = generator.section("step_tiny", {"step_tiny": result})
    assert "| captured | compiled: recording failed | 24,330 |" in page


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


def packing(saved: float, date: str, **more: Any) -> dict[str, Any]:
    """A step whose arms' own medians lie the other way round than what was saved within a round."""
    one = {"against": "wasteful-loop", "part": "whole", "seconds": 0.0758, "ours_seconds": 0.0784}
    one |= {"saved_seconds": saved, "saved_low": -0.0041, "saved_high": 0.0154, "gain": -0.033, "share": 0.081}
    one |= {"predicted_seconds": 0.00718, "ratio": saved / 0.00718, "holds": True}
    row = {"shape": "llama-3.2-1b", "layers": 16, "tokens": 2048, "attention": "sdpa", "recompute": False}
    rows = [{**row, "comparisons": [one]}]
    return {"benchmark": "packing", "date": date, "command": "slipstream bench packing", "rows": rows, **more}


def test_gain_is_of_the_estimate_that_saved_is(generator: Any) -> None:
    text = generator.page({"packing_x": packing(0.00613, "2026-01-01")})
    told = "| slipstream | wasteful-loop | whole | 6.13 ms | -4.10 ms to 15.4 ms | +8.8% (noise) |"
    assert f"{told} 7.18 ms | 0.854 | noise |" in text
    assert "-3.3%" not in text
    assert "| whole | 7.18 ms | 6.13 ms (noise) | -4.10 ms to 15.4 ms | 8.1% | 0.854 | `packing_x` |" in text


def test_of_two_measurements_the_later_is_shown(generator: Any) -> None:
    results = {"packing_a": packing(0.01, "2026-01-02T01"), "packing_b": packing(0.02, "2026-01-02T03")}
    text = generator.page(results)
    assert "| wasteful-loop | whole | 20.0 ms |" in text
    assert "| wasteful-loop | whole | 10.0 ms |" not in text
    assert "All of it was measured again later, and shown there instead: `packing_b`" in text
    assert "`packing_b` |" in text.split("## Plan")[0]
    other = {**results["packing_b"], "rows": [{**results["packing_b"]["rows"][0], "attention": "flex"}]}
    assert "measured again" not in generator.page({**results, "packing_b": other})


def test_what_was_asked_for_and_is_not_there_is_told(generator: Any) -> None:
    asked = {"asked": ["llama, sdpa", "llama, flex", "qwen"]}
    assert "(the benchmark ended before): llama, flex; qwen." in generator.page({"p": packing(0.01, "d", **asked)})
    whole = packing(0.01, "d", asked=["llama, sdpa"])
    assert "Not there" not in generator.page({"p": whole})
    command = "slipstream bench packing --shape llama-3.2-1b --tokens 2048 --attention sdpa"
    older = packing(0.01, "d", command=command)
    assert "before): llama-3.2-1b, 2048 tokens, sdpa, recomputed." in generator.page({"p": older})


def test_arms_that_failed_or_never_ran_are_told(generator: Any) -> None:
    runs = [{"arm": "slipstream", "median_step_ms": 1.0}, {"arm": "unsloth", "error": "Traceback\nValueError: no such"}]
    command = "python benchmarks/bench_train_step.py --rounds 2 --arms slipstream,unsloth,trl:eager"
    result = {"benchmark": "train_step", "command": command, "runs": runs, "summary": {"slipstream": {"x": 1}}}
    text = generator.page({"train_x": result})
    assert "(failed: ValueError: no such): unsloth." in text
    assert "(the benchmark ended before): 1 of 2 rounds of slipstream; trl:eager." in text


def test_fewer_rounds_than_asked_for_are_explained(generator: Any) -> None:
    row = {"part": "step", "shape": "gpt-oss-20b", "rounds": 2, "arms": {}, "comparisons": []}
    result = {"benchmark": "experts", "command": "slipstream bench experts --rounds 8", "rows": [row]}
    assert "8 rounds were asked for, and 2 made: " in generator.page({"e": result})
    assert "asked for" not in generator.page({"e": {**result, "rows": [{**row, "rounds": 8}]}})


def test_words_are_whole_and_zeros_have_no_sign(generator: Any) -> None:
    error = "CUDA out of memory. Tried to allocate 500.00 MiB. GPU 0 has 139.80 GiB. "
    error += "Of the allocated memory 74.18 GiB is allocated by PyTorch, and more"
    rows = [{"fits": False, "reason": error, "gain": -0.0001}, {"fits": True, "reason": None, "gain": 12.5}]
    text = generator.page({"x": {"rows": rows}})
    assert "| no | out of memory at 79.7 GB (0.52 GB more asked for) | 0.0% |" in text
    assert "| yes | – | +1250% |" in text
    assert "date not recorded." in text


def test_routing_alone_is_one_table(generator: Any) -> None:
    arms = {name: {"queries": 8, "seconds": 0.001} for name in ("where-loop", "grouped")}
    rows = [{"part": "scaling", "experts": count, "tokens": 64, "top_k": 4, "arms": arms} for count in (8, 16)]
    text = generator.page({"e": {"benchmark": "experts", "rows": rows}})
    assert "| 8 | 1.00 ms | 8 | 1.00 ms | 8 |\n| 16 | 1.00 ms | 8 | 1.00 ms | 8 |" in text


def test_counts_of_processes_have_a_line_each(generator: Any) -> None:
    run = {"processes": 2, "step_ms": 712.5, "scaling": 0.981, "device": "a card", "versions": {"torch": "2.11"}}
    run |= {
        "exposed_communication_ms": {"in a profile": 3.25, "against silent ranks": None},
        "device_peak_gb": [1.0, 2.0],
    }
    failed = {"processes": 4, "error": "Traceback\nValueError: no room"}
    summary = {"model": "qwen3-8b", "device": "a card", "scaling": {"2": 0.981}, "at_or_above_bar": True}
    result = {"benchmark": "scaling", "summary": summary, "runs": [run, failed]}
    text = generator.section("s", {"s": result})
    assert "a card; torch 2.11; " in text
    assert "model qwen3-8b, at or above bar yes." in text
    assert "| 2 | 712 ms | 0.981 | 3.25 ms | 2.00 GB | – |" in text
    assert "| 4 | – | – | – | – | ValueError: no room |" in text


def test_a_plan_measured_again_is_shown_once(generator: Any) -> None:
    row = {"shape": "qwen3-8b", "layers": 36, "tokens": 8192, "choices": "captured", "predicted_bytes": 2e9}
    row |= {"measured_bytes": 2e9, "predicted_seconds": 0.7, "measured_seconds": 0.7}
    older = {"benchmark": "plan", "date": "2026-01-01", "rows": [{**row, "measured_seconds": 0.35}]}
    text = generator.page({"a": older, "b": {**older, "date": "2026-01-02", "rows": [row]}})
    assert "| b | – | qwen3-8b | 36 |" in text
    assert "| a | qwen3-8b | 36 |" not in text
    assert "All of it was measured again later, and shown there instead: `b`" in text


def test_published_reloads_and_builds_have_ours_beside_them(generator: Any) -> None:
    copies = {"traced": {"both": {"hidden_share": 0.988}}}
    row = {
        "shape": "qwen3-8b",
        "tokens": 49_152,
        "layers": 8,
        "c": 0.00726,
        "link_bytes_per_second": {"back": 55.49e9},
        "predicted": {"T_single": 1.255, "T_double": 1.205},
        "arms": {"offload-2": {"copies": copies}},
        "comparisons": [{"arm": "offload-2", "against": "offload-1", "part": "whole", "saved_seconds": 0.0448}],
    }
    offload = {"benchmark": "offload", "date": "2026-01-01", "rows": [row]}
    text = generator.page({"offload_x": offload, "packing_x": packing(0.00613, "2026-01-01")})
    told = "| 8B dense | 55.7 GB/s | 6.60 ms | 31 | 55.5 GB/s | 7.26 ms | 6.2 | 7 | 1255 ms | 1205 ms | 98.8% |"
    assert f"{told} `offload_x` |" in text
    assert "| a metadata call | 0.20 ms |" in text


def test_a_product_of_noise_is_named(generator: Any) -> None:
    parts = [{"arm": name, "against": "off", "gain": 0.1, "gain_low": low} for name, low in PARTS_OF_ALL.items()]
    ours = {"arm": "published", "against": "off", "gain": 0.3, "gain_low": 0.2, "gain_high": 0.4, "product_gain": 0.33}
    row = {"shape": "gpt-oss-20b", "comparisons": [*({**one, "gain_high": 0.2} for one in parts), ours]}
    text = generator.page({"all_x": {"benchmark": "all", "date": "2026-01-01", "rows": [row]}})
    assert "+33.0% (noise: packing) | `all_x` |" in text


PARTS_OF_ALL = {"packing": -0.1, "reload": 0.05, "experts": 0.05}
"""Where each part's interval begins."""
