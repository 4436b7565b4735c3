"""The experts benchmark: proven equal first, every variant's waits counted, the bars and published figures beside."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from mixtures import experts_of, mixture_of
from slipstream.bench import experts, experts_arms, experts_command, experts_table
from slipstream.bench.experts_arms import ResultsDifferError, StepCase, layer_row, scaling_row, step_row
from slipstream.bench.experts_reference import HostQueries, look_up, use_where, where_experts
from slipstream.bench.shapes import MIXTURES, shape_config
from slipstream.errors import InputError
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.transform import Options, apply, restore

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    """The row of tiny steps, with adapters on attention and experts."""
    return step_row(StepCase("tiny-mixture", 2, 64, True, 2, CPU))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_arms, "REPEATS", 2)
    monkeypatch.setattr(experts_arms, "WARMUP", 0)


def test_one_layer_is_compared_with_the_reference() -> None:
    row = layer_row("tiny-mixture", 64, 2, CPU)
    assert {name: arm["queries"] for name, arm in row["arms"].items()} == {
        "where-loop": 8,
        "sorted-loop": 1,
        "grouped": 0,
    }
    assert all(arm["distance"] < 1e-4 for arm in row["arms"].values())
    assert [(one["ours"], one["part"]) for one in row["comparisons"]] == [
        (name, part) for name in ("sorted-loop", "grouped") for part in ("forward", "backward", "whole")
    ]
    for one in row["comparisons"]:
        assert one["against"] == "where-loop"
        assert one["saved_low"] <= one["saved_seconds"] <= one["saved_high"]
        assert one["gain"] == pytest.approx(one["saved_seconds"] / (one["seconds"] - one["saved_seconds"]))
        assert one["ratio"] == pytest.approx(1 + one["gain"])
    arm = row["arms"]["grouped"]["seconds"]
    assert arm["forward"] + arm["backward"] == pytest.approx(arm["whole"], rel=0.5)


@pytest.mark.parametrize("count", [8, 64])
def test_waits_grow_with_experts_only_in_the_reference(count: int) -> None:
    row = scaling_row(count, 32, 2, CPU)
    assert {name: arm["queries"] for name, arm in row["arms"].items()} == {
        "where-loop": count,
        "sorted-loop": 1,
        "grouped": 0,
    }
    assert all(arm["seconds"] > 0 for arm in row["arms"].values())


def test_steps_agree_and_are_compared(steps: dict[str, Any]) -> None:
    row = steps
    assert list(row["arms"]) == ["where-loop", "sorted-loop", "grouped", "transformers-grouped", "transformers-eager"]
    for name in ("where-loop", "sorted-loop", "grouped"):
        assert all(value < 1e-3 for value in row["arms"][name]["distance"].values())
    pairs = [(one["ours"], one["against"]) for one in row["comparisons"]]
    assert pairs == [
        ("sorted-loop", "where-loop"),
        ("grouped", "where-loop"),
        ("grouped", "sorted-loop"),
        ("grouped", "transformers-grouped"),
        ("grouped", "transformers-eager"),
    ]
    assert all(one["part"] == "whole" and one["ratio"] > 0 for one in row["comparisons"])
    for arm in row["arms"].values():
        assert set(arm["seconds"]) == {"forward", "backward", "update", "whole"}


def test_arms_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return where_experts(module, hidden, index.flip(-1), weights)

    monkeypatch.setattr(experts_arms, "LAYER_ARMS", {**experts_arms.LAYER_ARMS, "grouped": wrong})
    with pytest.raises(ResultsDifferError, match="grouped does not compute what where-loop computes"):
        layer_row("tiny-mixture", 64, 2, CPU)


@pytest.mark.parametrize("on_experts", [False, True])
def test_the_reference_takes_adapters_along(on_experts: bool) -> None:
    model = apply(add_adapter(mixture_of("gpt_oss"), AdapterOptions(rank=2, experts=on_experts), seed=0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3)
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        ours = model(input_ids=ids).logits
        use_where(model)
        with HostQueries() as queries:
            theirs = model(input_ids=ids).logits
        assert queries.count == 2 * 4  # layers, experts
        torch.testing.assert_close(theirs, ours)
        restore(model)
        torch.testing.assert_close(model(input_ids=ids).logits, ours)


def test_the_reference_is_what_the_model_computes_by_itself() -> None:
    model = mixture_of("gpt_oss")
    model.set_experts_implementation("eager")
    module = experts_of(model)
    x, index, weights = torch.randn(20, 32), torch.rand(20, 4).topk(2).indices, torch.rand(20, 2)
    assert torch.allclose(module(x, index, weights), where_experts(module, x, index, weights), atol=1e-5)
    assert [len(tokens) for tokens, _ in look_up(index, 4)] == torch.bincount(index.flatten(), minlength=4).tolist()


def test_shapes_are_the_published_ones() -> None:
    big, other = shape_config("gpt-oss-20b"), shape_config("qwen3-30b-a3b")
    assert (big.num_hidden_layers, big.hidden_size, big.num_local_experts) == (24, 2880, 32)
    assert (other.num_hidden_layers, other.num_experts, other.num_experts_per_tok) == (48, 128, 8)
    assert len(shape_config("gpt-oss-20b", 12).layer_types) == 12
    assert len(MIXTURES) == 3


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "device": "a card",
        "commit": "abc",
        "rows": list(rows),
        "published": experts.PUBLISHED,
        "bars": {**experts.BARS, "routing": experts.ROUTING_BAR},
    }


def scaled(count: int, seconds: float) -> dict[str, Any]:
    arms = {name: {"queries": 0, "seconds": seconds} for name in ("where-loop", "sorted-loop", "grouped")}
    return {"part": "scaling", "experts": count, "tokens": 4096, "top_k": 4, "arms": arms}


def test_bars_are_held_to_gpt_oss_alone(steps: dict[str, Any]) -> None:
    row = {**steps, "shape": "gpt-oss-20b", "adapters": "attention"}
    ratios = {one["against"]: one for one in row["comparisons"] if one["ours"] == "grouped"}
    row["comparisons"] = [
        {**ratios["transformers-grouped"], "ratio": 2.6},
        {**ratios["transformers-eager"], "ratio": 11.9},
    ]
    result = document(row, scaled(8, 1.0), scaled(256, 1.2), {"refused": "no room"})
    assert experts_table.summary(result) == {"benchmark": "experts", "bars": 3, "met": 2, "left_out": 1}
    assert experts_table.summary(document(steps))["bars"] == 0
    assert experts_table.summary(document({**row, "adapters": "attention and experts"}))["bars"] == 0
    console = Console(record=True, width=100)
    experts_table.show(result, console)
    shown = console.export_text()
    assert "2.60 times as fast; bar 2.5: met" in shown
    assert "11.90 times as fast; bar 12: not met" in shown
    assert "1.20 times as long; bar at most 1.3: met" in shown
    assert "left out: no room" in shown


def test_documents_that_see_each_other_are_told(steps: dict[str, Any]) -> None:
    """transformers packs by positions, which gpt-oss does not look at; its own arms differ, ours don't."""
    console = Console(record=True, width=100)
    experts_table.show(document(steps), console)
    stock = steps["arms"]["transformers-grouped"]["distance"]["token_losses"]
    assert ("documents see each other" in console.export_text()) == (stock > 0.02)
    close = {**steps["arms"], "transformers-grouped": {**steps["arms"]["grouped"]}}
    experts_table.show(document({**steps, "arms": close}), console)
    assert "documents see each other" not in console.export_text(clear=True)[-200:]


def test_what_does_not_fit_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> dict[str, Any]:
        raise torch.OutOfMemoryError("no memory\nmore")

    monkeypatch.setattr(experts, "layer_row", full)
    result = experts.run(experts.ExpertsBench(part="layer", tokens=64, rounds=2), lambda _: None)
    assert result["rows"] == [{"refused": "out of memory"}]


@pytest.mark.parametrize(("asked", "layer", "step"), [(8, 8, 8), (None, 3, 2)])
def test_as_many_rounds_as_asked_for(asked: int | None, layer: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def layer_row(shape: str, tokens: int, rounds: int, *_: Any) -> dict[str, Any]:
        seen.append(rounds)
        return {"part": "layer"}

    def step_row(case: StepCase, _: Any) -> dict[str, Any]:
        seen.append(case.rounds)
        return {"part": "step"}

    monkeypatch.setattr(experts, "layer_row", layer_row)
    monkeypatch.setattr(experts, "step_row", step_row)
    monkeypatch.setattr(experts, "scaling_row", layer_row)
    experts.run(experts.ExpertsBench(part="step", tokens=64, rounds=asked), lambda _: None)
    assert seen == [step, step]
    experts.run(experts.ExpertsBench(part="layer", tokens=64, rounds=asked), lambda _: None)
    assert seen[2:] == [layer]


def test_every_arm_of_a_step_is_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[dict[str, int]] = []
    measured = experts_arms.measure

    def counting(*words: Any) -> Any:
        times = measured(*words)
        counts.append({name: len(parts["whole"]) for name, parts in times.items()})
        return times

    monkeypatch.setattr(experts_arms, "measure", counting)
    row = step_row(StepCase("tiny-mixture", 2, 64, False, 3, CPU))
    assert counts == [dict.fromkeys(row["arms"], 3)]


def test_a_run_cut_short_has_written_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(count: int, *_: Any) -> dict[str, Any]:
        if count > 8:
            raise KeyboardInterrupt
        return scaled(count, 1.0)

    monkeypatch.setattr(experts, "scaling_row", once)
    asked = experts_command.options(part="scaling", tokens=64)
    with pytest.raises(KeyboardInterrupt):
        experts_command.run(asked, Console(stderr=True), out=tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["rows"] == [scaled(8, 1.0)]
    assert written["asked"][1] == "routing 64 tokens to 16 experts"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"shape": "llama-3.2-1b"}, "has no experts; there is gpt-oss-20b"),
        ({"tokens": 12}, "tokens 12 < 64"),
        ({"part": "both"}, "part 'both' is none of layer, scaling, step, all"),
        ({"adapters": "router"}, "adapters 'router' is none of attention, experts"),
        ({"rounds": 1}, "rounds 1 < 2"),
        ({"shape": "tiny-mixture", "layers": 99}, "layers 99: tiny-mixture has 4"),
    ],
)
def test_bad_words_are_told(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        experts_command.options(**words)


def test_restoring_after_a_comparison_leaves_the_models_own() -> None:
    model = mixture_of("gpt_oss")
    apply(model, Options(experts="loop"))
    use_where(model)
    restore(model)
    assert model.config._experts_implementation == "grouped_mm"
