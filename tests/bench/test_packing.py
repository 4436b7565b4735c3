"""The packing benchmark on a tiny shape: all arms, what they build, and that unequal arms are found out."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.bench import packing, packing_fit, wasteful
from slipstream.bench.harness import WHOLE
from slipstream.bench.packing import PackingBench, compare, csv_rows, predicted_saving
from slipstream.bench.packing_arms import (
    BACKWARD,
    FORWARD,
    LAYER,
    OURS,
    ResultsDifferError,
    Workbench,
    packed_steps,
    prove_equal,
)
from slipstream.bench.shapes import random_documents, shape_config
from slipstream.errors import InputError

LAYERS, TOKENS = 3, 128
ARMS = ["stock", "wasteful-loop", "wasteful-vectorised", "slipstream"]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    asked = PackingBench(
        shapes=("tiny",), tokens=(TOKENS,), attention=("varlen", "sdpa"), rounds=2, warmup=0, layers=LAYERS
    )
    return json.loads(json.dumps(packing.run(asked, lambda _: None), allow_nan=False))


def rows(result: dict[str, Any], attention: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["attention"] == attention]


def test_every_case_is_a_row(result) -> None:
    cases = [(row["attention"], row["recompute"]) for row in result["rows"]]
    assert cases == [("varlen", False), ("varlen", True), ("sdpa", False), ("sdpa", True)]
    assert all(row["tokens"] == TOKENS and row["layers"] == LAYERS and row["documents"] >= 2 for row in result["rows"])


def test_a_refused_choice_says_why(result) -> None:
    assert all("varlen" in row["refused"] and "CUDA" in row["refused"] for row in rows(result, "varlen"))


def test_arms_compute_the_same(result) -> None:
    for row in rows(result, "sdpa"):
        assert list(row["arms"]) == ARMS
        losses = {arm["loss"] for arm in row["arms"].values()}
        assert max(losses) - min(losses) < 1e-5
        assert all(value < 1e-4 for arm in row["arms"].values() for value in arm["distance"].values())


def test_builds_are_counted(result) -> None:
    keep, recompute = rows(result, "sdpa")
    for row, passes in ((keep, 1), (recompute, 2)):
        counts = {name: arm["builds"] for name, arm in row["arms"].items()}
        rebuilt = {"metadata": passes * LAYERS, "structures": passes * LAYERS}
        once = {"metadata": 1, "structures": 1}
        assert counts == dict(zip(ARMS, (None, rebuilt, rebuilt, once), strict=True))


def test_prediction_follows_from_what_a_rebuild_adds(result) -> None:
    for row in rows(result, "sdpa"):
        found = {(one["against"], one["part"]): one for one in row["comparisons"]}
        assert len(found) == 9
        assert row["builds"]["rebuild-loop"] > row["builds"]["metadata"] * 0.2 > 0
        added = row["rebuild_adds"]["loop"]
        again = row["rebuild_adds_to_recompute"]["loop"] if row["recompute"] else 0.0
        whole = (LAYERS - 1) * added + LAYERS * again
        assert row["recompute"] == ("rebuild_adds_to_recompute" in row)
        assert found["wasteful-loop", BACKWARD]["predicted_seconds"] == pytest.approx(LAYERS * again)
        assert found["wasteful-loop", FORWARD]["predicted_seconds"] == pytest.approx((LAYERS - 1) * added)
        assert found["wasteful-loop", WHOLE]["predicted_seconds"] == pytest.approx(whole)
        assert found["stock", WHOLE]["predicted_seconds"] is found["stock", WHOLE]["holds"] is None
        assert {len(series) for arm in row["arms"].values() for series in arm["seconds"].values()} == {2}


def test_what_a_rebuild_adds_is_the_paired_difference() -> None:
    times = {"layer-slipstream": {LAYER: [1.0, 5.0, 2.0]}, "layer-wasteful-loop": {LAYER: [3.0, 6.0, 8.0]}}
    case = SimpleNamespace(kinds=["loop"], bench=SimpleNamespace(layers=4))
    assert packing._added_by_rebuilding(case, times, LAYER) == {
        "loop": 0.5
    }  # the median of 2, 1 and 6 over four layers


def test_one_layer_is_timed_alone(result) -> None:
    for row in rows(result, "sdpa"):
        assert set(row["layer"]) == {"slipstream", "wasteful-loop", "wasteful-vectorised"}
        assert all(value > 0 for value in row["layer"].values())


def test_document_says_what_was_measured(result) -> None:
    assert result["benchmark"] == "packing"
    assert {"device", "versions", "command", "commit", "date", "rounds", "published"} <= set(result)
    llama, qwen, big = result["published"]["models"]
    assert (llama["saved_seconds"], qwen["saved_seconds"]) == (0.199, 0.319)
    # the published predictions are the formula on the published mask build
    for model in (llama, qwen):
        seconds = predicted_saving(WHOLE, model["layers"], result["published"]["mask_seconds"])
        assert seconds == pytest.approx(model["predicted_seconds"], rel=0.005)
    assert big["gain"] == {FORWARD: 0.433, BACKWARD: 0.058, WHOLE: 0.143}


def test_csv_rows_are_flat(result) -> None:
    flat = csv_rows(result)
    assert len(flat) == 18
    assert len({tuple(row) for row in flat}) == 1
    assert all(not isinstance(value, dict | list) for row in flat for value in row.values())


def test_model_is_left_as_it_was() -> None:
    bench = Workbench.of(shape_config("tiny", 2), torch.device("cpu"))
    case = packing.Case(bench, "tiny", TOKENS, "sdpa", False, random_documents(TOKENS, 500))
    row = packing.measure_case(case, PackingBench(rounds=2, warmup=0, part="layer"))
    assert "layer" in row
    assert "comparisons" not in row
    assert not hasattr(bench.base, "_slipstream")
    assert all(parameter.grad is None for parameter in bench.parameters)


def test_every_case_begins_with_the_same_adapters() -> None:
    bench = Workbench.of(shape_config("tiny", 2), torch.device("cpu"))
    case = packing.Case(bench, "tiny", TOKENS, "sdpa", True, random_documents(TOKENS, 500))
    packing.measure_case(case, PackingBench(rounds=2, warmup=0))
    trained = [parameter.detach().clone() for parameter in bench.parameters]
    assert any(not torch.equal(now, then) for now, then in zip(trained, bench.begun, strict=True))
    seen: list[list[torch.Tensor]] = []

    def note(*_: Any) -> dict[str, Any]:
        seen.append([parameter.detach().clone() for parameter in bench.parameters])
        raise InputError("seen")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_measured", note)
        assert packing.measure_case(case, PackingBench(rounds=2))["refused"] == "seen"
    assert all(torch.equal(now, then) for now, then in zip(seen[0], bench.begun, strict=True))
    assert not bench.optimizer.state


def leaking(row: wasteful.PackedRow, *_: Any) -> wasteful.Segments:
    return wasteful.Segments.from_lengths([row.position_ids.shape[1]])


def test_documents_that_see_each_other_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wasteful, "rebuild", leaking)
    bench = Workbench.of(shape_config("tiny", 2), torch.device("cpu"))
    bench.set_recompute(False)
    steps = packed_steps(bench, random_documents(TOKENS, 500), TOKENS, "sdpa", ("vectorised",))
    with pytest.raises(ResultsDifferError, match="wasteful-vectorised does not compute what stock computes") as caught:
        prove_equal(steps)
    # far outside what rounding in bf16 is allowed, too
    distance = float(str(caught.value).split("'token_losses': ")[1].split(",")[0])
    assert distance > 0.3


def test_masks_that_do_not_fit_are_refused_with_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_fit, "bench_free_bytes", lambda _: 1_000_000)
    asked = PackingBench(shapes=("tiny",), tokens=(512,), attention=("sdpa",), recompute=(False,), rounds=2, layers=2)
    (row,) = packing.run(asked, lambda _: None)["rows"]
    assert "one dense mask takes 1,572,864 bytes" in row["refused"]  # 512² x (4 + 2)
    assert "1,000,000 bytes" in row["refused"]
    assert "lower --tokens" in row["refused"]


def times(theirs: list[float], ours: list[float]) -> dict[str, dict[str, list[float]]]:
    return {"other": {WHOLE: theirs}, OURS: {WHOLE: ours}}


def test_comparison_of_known_times() -> None:
    found = compare(times([0.3, 0.5, 0.4], [0.2, 0.4, 0.3]), "other", WHOLE, 0.11)
    assert found["saved_seconds"] == pytest.approx(0.1)
    assert found["gain"] == pytest.approx(1 / 3)
    assert found["share"] == pytest.approx(0.25)
    assert found["ratio"] == pytest.approx(1 / 1.1)
    assert found["holds"] is True
    assert compare(times([0.3, 0.5, 0.4], [0.2, 0.4, 0.3]), "other", WHOLE, 0.2)["holds"] is False


def test_nothing_predicted_nothing_judged() -> None:
    found = compare(times([0.3, 0.3], [0.3, 0.3]), "other", WHOLE, 0.0)
    assert (found["ratio"], found["holds"]) == (None, None)


def test_recompute_builds_once_more_a_layer() -> None:
    parts = {part: predicted_saving(part, 16, 0.0137, 0.0137) for part in (FORWARD, BACKWARD, WHOLE)}
    assert parts == pytest.approx({FORWARD: 15 * 0.0137, BACKWARD: 16 * 0.0137, WHOLE: 31 * 0.0137})
    assert predicted_saving(BACKWARD, 16, 0.0137) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shapes": ("qwen3-0.6",)}, "did you mean qwen3-0.6b"),
        ({"shapes": ("tiny",), "layers": 9}, "layers 9: tiny has 4"),
        ({"tokens": (63,)}, "tokens 63 < 64"),
        ({"attention": ("flash",)}, "attention 'flash' is unknown; there is varlen"),
        ({"rounds": 1}, "rounds 1 < 2"),
    ],
)
def test_bad_input_is_told_before_a_model_is_made(options, message) -> None:
    with pytest.raises(InputError, match=message):
        PackingBench(**options)
