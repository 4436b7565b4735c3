"""A printed plan: what is said of one thing is said once, or of different things in different words."""

import re
from pathlib import Path
from typing import Any

import pytest

from cost.configs import GPT_OSS_20B, QWEN3_06B, QWEN3_14B, SMOLLM2
from planning import decisions, plan, recipe_of
from slipstream.cost.sizes import size_text
from slipstream.errors import InputError
from slipstream.train.options import MOST_STEPS, TrainOptions, check_schedule

WALKED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (QWEN3_06B, ()),
    (QWEN3_14B, ("packing.tokens=8192",)),
    (GPT_OSS_20B, ()),
    (SMOLLM2, ("adapter.kind=none", "train.steps=1")),
    (SMOLLM2, ("packing.tokens=768", "train.accumulate=4", "train.steps=1")),
    (SMOLLM2, ("packing.enabled=false", "packing.rows=4")),
    ({**SMOLLM2, "num_hidden_layers": 2, "hidden_size": 72}, ("memory.activations=recompute",)),
]


@pytest.mark.parametrize(("config", "overrides"), WALKED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("device", ["h200", "t4", "rtx-4060-laptop", "dgx-spark", None])
@pytest.mark.usefixtures("cpu_machine")
def test_a_printed_plan_does_not_contradict_itself(
    tmp_path: Path, config: dict[str, Any], overrides: tuple[str, ...], device: str | None
) -> None:
    document, _, said = plan(recipe_of(tmp_path, config, *overrides), device)
    assert not re.search(
        r"\b0\.0 [GMK]iB|\b1 (layers|steps|rows|tokens|evaluations|documents)\b|\bon cpu\b|\(\d, \d\)", said
    )
    assert not re.search(r"[+-]0%|\d-\d+\.\d s| share\b", said)
    (headline,) = re.findall(r"a step takes about (\S+ \S+(?: \d+ \S+)?) \(", said)
    (together,) = re.findall(r"^ *the step +(\S.*?) *$", said, re.MULTILINE)
    assert headline == together
    times = document["times"]
    parts = max(times["device"], times["host"]) + times["waits"]
    assert parts == pytest.approx(document["step_seconds"])
    assert ("host's waits, on top" in said) == (times["waits"] > 0)
    assert said.count("matrix products as they run") == 1  # beside the floor, which is said to be at another rate
    assert said.count("of a large one") == 1
    told = {item["name"]: item["on"] for item in document["decisions"]}
    for gain in document["gains"]:
        if gain["name"] in ("recompute", "offload", "packing", "tiled mlp"):
            assert gain["on"] == told[gain["name"]]


@pytest.mark.usefixtures("cpu_machine")
def test_what_a_decision_says_of_memory_is_the_tables_sum(tmp_path: Path) -> None:
    """In an eager step, as the decision says; the table beside it is of the step that will run."""
    document, _, _ = plan(recipe_of(tmp_path), None)
    parts = {part["name"]: part["bytes"] for part in document["memory"]["device"]}
    kept = parts["activations"] + parts["attention mask"] + parts["loss"]
    _, reason = decisions(document)["recompute"]
    assert (
        f"an eager step of 1,024 tokens that keeps all activations takes about {size_text(kept)} at its peak" in reason
    )
    assert "that weights, gradients and optimizer leave free" in reason


def test_gradients_say_in_what_they_are_held_and_how_often(tmp_path: Path) -> None:
    def told(device: str, *overrides: str) -> tuple[int, str]:
        document, _, _ = plan(recipe_of(tmp_path, QWEN3_06B, *overrides), device)
        (found,) = [part for part in document["memory"]["device"] if part["name"] == "gradients"]
        return found["bytes"], found["what"]

    assert told("h200") == (4 * 10_092_544, "10,092,544 in float32")
    assert told("h200", "train.mode=compiled", "train.accumulate=2") == told("h200")
    both = told("h200", "train.accumulate=2")
    assert both == (8 * 10_092_544, "10,092,544 in float32, once more in the graph")


def test_evaluations_are_told_beside_the_time_that_they_are_part_of(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, QWEN3_06B, f"data.eval={tmp_path / 'rows.jsonl'}", "train.steps=1")
    document, _, said = plan(recipe)
    assert "1 step takes about" in said
    assert "with 2 evaluations, loading not counted" in said
    assert document["seconds"] > document["step_seconds"]


def test_a_step_has_no_more_batches_than_the_data(tmp_path: Path) -> None:
    document, _, _ = plan(recipe_of(tmp_path, QWEN3_06B, "train.accumulate=16"))  # of 16 rows
    beyond, _, _ = plan(recipe_of(tmp_path, QWEN3_06B, "train.accumulate=1000000"))
    assert beyond["step_seconds"] == document["step_seconds"]
    assert beyond["seconds"] == document["seconds"]


def test_a_mask_alone_takes_the_attention_that_training_takes(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    document, _, _ = plan(recipe_of(tmp_path, {"model_type": "stablelm", "vocab_size": 320, **sizes}))
    on, reason = decisions(document)["attention"]
    assert on
    assert reason.startswith("sdpa: ")
    assert "this model hands its attention a mask, but no segments" in reason
    assert document["choices"]["attention"] == "sdpa"
    assert "attention mask" in {part["name"] for part in document["memory"]["device"]}


def test_steps_beyond_reason_are_refused_once_rows_are_counted() -> None:
    check_schedule(TrainOptions(), MOST_STEPS)
    with pytest.raises(InputError, match=r"train.epochs: 1e\+06 makes 3,000,000,000 steps > 2,147,483,647; lower it"):
        check_schedule(TrainOptions(epochs=1e6), 3 * 10**9)


def test_a_plan_needs_configuration_and_tokenizer_and_says_so(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    assert not list((tmp_path / "model").glob("*.safetensors"))
    assert plan(recipe)[1]
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(
        InputError, match=r"has no tokenizer \(tokenizer.json, .*\); copy the tokenizer files of the base"
    ):
        plan(recipe)
