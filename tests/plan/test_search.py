"""What would make a recipe fit: of each key the value nearest to what is asked, in order of how little it changes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cost.configs import QWEN3_06B, QWEN3_14B, SMOLLM2
from planning import CPU_RATES, plan, recipe_of
from slipstream.errors import InputError
from slipstream.plan.prediction import _limited
from slipstream.plan.search import _below

FULL = ["adapter.kind=none", "data.overlong=truncate"]
ASKED: list[tuple[dict[str, Any], str, list[str], str, int]] = [
    (SMOLLM2, "rtx-2070-laptop", [*FULL, "packing.tokens=32768"], "packing.tokens", 16384),
    (SMOLLM2, "rtx-2070-laptop", [*FULL, "packing.tokens=32768", "train.steps=100"], "packing.tokens", 16384),
    (QWEN3_06B, "rtx-4060-laptop", ["packing.tokens=131072", "memory.host_limit=8"], "packing.tokens", 65536),
    (QWEN3_06B, "rtx-4060-laptop", ["packing.rows=32", "memory.activations=keep"], "packing.rows", 3),
]


@pytest.mark.parametrize(("config", "device", "overrides", "key", "least"), ASKED)
def test_a_number_is_changed_as_little_as_fits(
    tmp_path: Path, config: dict[str, Any], device: str, overrides: list[str], key: str, least: int
) -> None:
    """``least``: a value known to fit."""
    document, fits, said = plan(recipe_of(tmp_path, config, *overrides), device)
    assert not fits
    (found,) = [remedy for remedy in document["remedies"] if list(remedy["changes"]) == [key]]
    value = found["changes"][key]
    assert value >= least
    assert f"--set {key}={value}   (" in said
    model = tmp_path / "model"
    assert plan(recipe_of(tmp_path, model, *overrides, f"{key}={value}"), device)[1]
    nearer = value + 1 if key == "packing.rows" else value * 5 // 4
    assert not plan(recipe_of(tmp_path, model, *overrides, f"{key}={nearer}"), device)[1]


def test_what_learns_the_same_comes_first_and_then_what_takes_least_a_token(tmp_path: Path) -> None:
    keep = ["packing.tokens=16384", "memory.activations=keep", "packing.rows=2"]
    document, fits, said = plan(recipe_of(tmp_path, QWEN3_06B, *keep), "rtx-4090-laptop")
    assert not fits
    keys = [tuple(remedy["changes"]) for remedy in document["remedies"]]
    assert len(set(keys)) == len(keys) > 1  # each key once
    assert keys[0] == ("memory.activations",)
    assert "by any one of these (what learns the same first, then by the time a token takes):" in said
    paces = []
    for remedy in document["remedies"][1:]:
        changes = [f"{key}={value}" for key, value in remedy["changes"].items()]
        paces.append(plan(recipe_of(tmp_path, tmp_path / "model", *keep, *changes), "h200")[0]["tokens_per_second"])
    assert paces == sorted(paces, reverse=True)


@pytest.mark.parametrize("steps", ["100", "null"])
def test_fewer_tokens_learned_are_told_where_steps_are_given(tmp_path: Path, steps: str) -> None:
    recipe = recipe_of(tmp_path, QWEN3_06B, "packing.rows=32", "memory.activations=keep", f"train.steps={steps}")
    document, _, said = plan(recipe, "rtx-4060-laptop")
    (costs,) = [remedy["costs"] for remedy in document["remedies"] if list(remedy["changes"]) == ["packing.rows"]]
    assert len([cost for cost in costs if cost.endswith("fewer tokens in its 100 steps")]) == (steps == "100")
    assert ("fewer tokens in its 100 steps)" in said) == (steps == "100")
    (activations,) = [remedy for remedy in document["remedies"] if list(remedy["changes"]) == ["memory.activations"]]
    assert activations["costs"] == []


@pytest.mark.parametrize(("overlong", "word"), [("truncate", "cuts"), ("drop", "drops"), ("split", "splits")])
def test_documents_that_would_be_cut_are_told(tmp_path: Path, overlong: str, word: str) -> None:
    """Of 100, 200, 300 and 400 tokens, sixteen each, in rows of fewer than 400."""
    asked = ["packing.tokens=448", "packing.rows=4", "packing.enabled=false", f"data.overlong={overlong}"]
    recipe = recipe_of(tmp_path, QWEN3_06B, *asked, "memory.activations=keep", "adapter.rank=8", "load.quantize=nf4")
    document, fits, said = plan(recipe, tight(tmp_path, recipe))
    assert not fits
    (found,) = [remedy for remedy in document["remedies"] if list(remedy["changes"]) == ["packing.tokens"]]
    limit = found["changes"]["packing.tokens"]
    assert 300 <= limit < 400
    assert found["costs"] == [f"{word} 16 of 64 documents"]
    assert f"{word} 16 of 64 documents)" in said


def tight(tmp_path: Path, recipe: Any) -> str:
    """A described device that this recipe just does not fit on."""
    needed = plan(recipe)[0]["device_bytes"]
    device = {"kind": "cuda", "name": "another card", "memory_bytes": 24 * 2**30, "compute_capability": [8, 9]}
    rates = {**vars(CPU_RATES), "dtype": "bfloat16", "matmul": 1e14, "copy": 9e11, "to_device": 2e10}
    path = tmp_path / "tight.json"

    def written(size: int) -> int:
        described = {**device, "memory_bytes": size, "bf16": True, "unified_memory": False}
        told = {"devices": [described], "ceilings": rates, "host_memory": {"usable_bytes": 32 * 2**30}}
        path.write_text(json.dumps(told))
        return round(plan(recipe, str(path))[0]["room_bytes"])

    size = 24 * 2**30
    for _ in range(4):
        size -= written(size) - round(0.97 * needed)
    assert written(size) < needed
    return str(path)


def test_held_out_documents_are_not_cut_silently_either(tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text('{"text": "' + "y" * 20_000 + '"}\n')
    asked = ["packing.tokens=131072", "memory.host_limit=8", f"data.eval={long}"]
    document, fits, _ = plan(recipe_of(tmp_path, QWEN3_14B, *asked), "rtx-4090-laptop")
    assert not fits
    changed = [remedy["changes"].get("packing.tokens", 2**17) for remedy in document["remedies"]]
    assert all(tokens > 20_000 for tokens in changed)


def test_values_below() -> None:
    assert list(_below(1024, 256)) == [896, 768, 640, 512, 448, 384, 320, 256]
    assert list(_below(16, 8)) == [14, 12, 10, 8]
    assert list(_below(9, 8)) == [8]
    assert list(_below(8, 8)) == list(_below(5, 8)) == []
    assert list(_below(1000, 700)) == [875, 750, 700]


def test_lengths_that_a_shorter_row_leaves() -> None:
    lengths = np.array([3, 8, 5, 1])
    left = {kind: _limited(lengths, 3, kind).tolist() for kind in ("error", "truncate", "drop", "split")}
    assert left["error"] == left["truncate"] == [3, 3, 3, 1]
    assert left["drop"] == [3, 1]
    assert sorted(left["split"]) == [1, 2, 2, 3, 3, 3, 3]
    with pytest.raises(InputError, match="leaves no document of at most 2 tokens"):
        _limited(np.array([3, 4]), 2, "drop")
