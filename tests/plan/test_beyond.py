"""What several machines could not hold is refused before weights are read; what one might hold is tried."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from planning import CPU, CPU_RATES, GIB, recipe_of
from slipstream import run
from slipstream.errors import InputError
from slipstream.plan import facts
from slipstream.plan.beyond import WIDE, check_within_reach
from slipstream.plan.prediction import predict
from slipstream.recipe import Recipe, load_recipe
from tiny import tiny_model, tiny_tokenizer


def found_for(recipe: Recipe) -> facts.Facts:
    model = facts.skeleton(recipe)
    shape, adapted = facts.shape_of(model), facts.adapted_sizes(recipe.adapter, model)
    return facts.Facts(model, shape, adapted, 0, np.full(64, 200), None, {})


def machine(memory: float) -> facts.Target:
    device = facts.replace(CPU, memory_bytes=round(memory))
    return facts.Target(device, CPU_RATES, 1.0 * GIB, None, here=True)


def test_only_what_is_wide_of_all_memory_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    found = found_for(recipe)
    needed = predict(recipe, found, machine(16 * GIB)).memory.device_bytes
    check_within_reach(recipe, found, machine(1.01 * needed / WIDE))  # though little of it is free
    with pytest.raises(InputError, match=r"of 1,024 tokens takes about .* GiB, more than 4 times all the .* processor"):
        check_within_reach(recipe, found, machine(0.99 * needed / WIDE))
    divided = recipe_of(tmp_path, tmp_path / "model", "train.sharding=fsdp2")
    check_within_reach(divided, found, machine(0.99 * needed / WIDE))


def test_training_refuses_before_it_reads_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "base"
    tiny_model().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "some words"}) + "\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {base}\ndata: {{train: {tmp_path}/rows.jsonl}}\noutput: {tmp_path}/run\n")

    def read(*_: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(run, "build_model", read)
    told = r"10,000,000 tokens .* the attention mask \(.*\); it fits with --set packing.tokens=\d+ \(slipstream plan"
    with pytest.raises(InputError, match=told):
        run.train(
            load_recipe(str(recipe), ["packing.tokens=10000000"]), resume=False, console=Console(file=io.StringIO())
        )
    assert list((tmp_path / "run").iterdir()) == []
