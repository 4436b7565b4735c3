"""``bench all``: every arm goes without what it claims to go without, all compute the same, gains multiply."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import cli
from slipstream.bench import wasteful
from slipstream.bench.packing_arms import ResultsDifferError
from slipstream.bench.shapes import shape_config
from slipstream.bench.together import TogetherBench, comparisons, csv_rows, published
from slipstream.bench.together_arms import ALL, EXPERTS, OFF, PACKING, PUBLISHED, RELOAD, STEP, Bench, prove_equal
from slipstream.errors import InputError

CPU = torch.device("cpu")
LAYERS = 2
QUICK = ["--tokens", "64", "--rounds", "2", "--layers", str(LAYERS)]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is to be compiled runs as it is (``tests/step`` compiles layers); the names of what was."""
    asked: list[str] = []

    def as_it_is(function: Any, **_: Any) -> Any:
        asked.append(function.__qualname__)
        return function

    monkeypatch.setattr(torch, "compile", as_it_is)
    return asked


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["slipstream", "bench", "all", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_both_shapes_on_a_cpu(uncompiled, monkeypatch, capfd, tmp_path: Path) -> None:
    assert call(monkeypatch, *QUICK, "--json", "--out", f"{tmp_path}/r.json", "--csv", f"{tmp_path}/r.csv") == 0
    out, err = capfd.readouterr()
    result = json.loads(out)
    assert json.loads((tmp_path / "r.json").read_text()) == result
    mixture, dense = result["rows"]
    assert list(mixture["arms"]) == [OFF, PACKING, RELOAD, EXPERTS, STEP, PUBLISHED, ALL]
    assert list(dense["arms"]) == [OFF, PACKING, RELOAD, STEP, PUBLISHED, ALL]
    assert (mixture["left_out"], dense["left_out"]) == ({}, {EXPERTS: "a dense model has no experts"})
    for row in (mixture, dense):
        arms = row["arms"]
        built = {name: arm["boundaries"] for name, arm in arms.items()}
        assert {built[PACKING], built[PUBLISHED], built[ALL]} == {1}
        assert {built[OFF], built[RELOAD], built[STEP]} == {2 * LAYERS}, "once in each forward and recompute"
        assert {name for name, arm in arms.items() if arm["buffers"] == 2} == {RELOAD, PUBLISHED, ALL}
        assert {name for name, arm in arms.items() if arm["ran"] == "compiled"} == {STEP, ALL}
        assert all(arm["distance"] < 1e-3 and len(arm["seconds"]["whole"]) == 2 for arm in arms.values())
        assert row["notes"] == []
    layers = {"GptOssDecoderLayer.forward", "LlamaDecoderLayer.forward"}
    assert layers <= set(uncompiled), "the step's arms compile layers"
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 1 + len(csv_rows(result)) == 12
    for told in ("everything on", "product of its parts", "+15% / +25%", "packing alone"):
        assert told in err


def test_gains_and_their_product() -> None:
    def seconds(value: float) -> dict[str, list[float]]:
        return {"whole": [value, value]}

    times = {OFF: seconds(6.0), PACKING: seconds(5.0), RELOAD: seconds(4.0), PUBLISHED: seconds(3.0), ALL: seconds(2.0)}
    found = {one["arm"]: one for one in comparisons(times)}
    assert found[PACKING]["gain"] == pytest.approx(0.2)
    assert found[RELOAD]["saved_seconds"] == pytest.approx(2.0)
    assert found[PUBLISHED]["gain"] == pytest.approx(1.0)
    assert found[PUBLISHED]["product_gain"] == pytest.approx(1.2 * 1.5 - 1)
    assert found[ALL]["product_gain"] == pytest.approx(0.8), "what was not measured is no factor"
    assert found[PUBLISHED]["published"] == "+15% / +25%"
    assert (published(PACKING), published(RELOAD), published(ALL)) == ("+14.3%", "+4.6% to +8.4%", None)


@pytest.fixture
def bench() -> Any:
    made = Bench.of(shape_config("tiny", LAYERS), 64, "auto", CPU)
    yield made
    made.close()


def test_an_arm_that_computes_something_else_is_found_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(row: wasteful.PackedRow, *_: Any) -> wasteful.Segments:
        row.boundaries("vectorised")
        return wasteful.Segments.from_lengths([row.position_ids.shape[1]])

    monkeypatch.setattr(wasteful, "rebuild", leaking)
    arms = bench.arms()
    with pytest.raises(ResultsDifferError, match="packing does not compute what off computes"):
        prove_equal({name: arms[name] for name in (OFF, PACKING)})


def test_an_arm_that_kept_its_boundaries_is_no_reference(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[int, wasteful.Segments] = {}

    def keeping(row: wasteful.PackedRow, *_: Any) -> wasteful.Segments:
        return kept.setdefault(id(row), kept.get(id(row)) or row.boundaries("vectorised"))

    monkeypatch.setattr(wasteful, "rebuild", keeping)
    with pytest.raises(AssertionError, match="off kept its boundaries"):
        prove_equal({OFF: bench.arms()[OFF]})


def test_model_is_left_as_it_was() -> None:
    bench = Bench.of(shape_config("tiny", LAYERS), 64, "auto", CPU)
    attention = bench.fitted.previous_attention
    prove_equal({OFF: bench.arms()[OFF]})
    bench.close()
    assert not hasattr(bench.base, "_slipstream")
    assert bench.base.config._attn_implementation == attention
    assert not any(getattr(module, "gradient_checkpointing", False) for module in bench.base.modules())
    assert all(parameter.grad is None for parameter in bench.parameters)


def test_what_can_not_be_measured_is_told_first(monkeypatch, capfd) -> None:
    for words, told in (
        ({"shapes": ("tini",)}, "did you mean tiny"),
        ({"tokens": 12}, "tokens 12 < 64"),
        ({"attention": "fast"}, "--attention 'fast' is none of auto, varlen"),
        ({"rounds": 1}, "rounds 1 < 2"),
    ):
        with pytest.raises(InputError, match=told):
            TogetherBench(**words)
    assert call(monkeypatch, "--out", "/no/such/folder/r.json") == 2
    assert "existing folder" in capfd.readouterr().err
