"""Recipes of models that exist as configurations alone, and their plans."""

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoConfig

from cost.configs import QWEN3_06B
from slipstream.cost.ceilings import Ceilings
from slipstream.cost.hardware import Device
from slipstream.plan import command
from slipstream.recipe import Recipe, load_recipe
from tiny import tiny_tokenizer

GIB = 2**30
CPU = Device("cpu", "a processor", 16 * GIB, None, bf16=False, unified_memory=True)
CPU_RATES = Ceilings("float32", 2e11, 2e10, None, None, None, 5e-6, 0.0, "measured")


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A configuration and a tokenizer: all that a plan reads of a model."""
    values = {name: value for name, value in config.items() if name != "model_type"}
    AutoConfig.for_model(config["model_type"], **values).save_pretrained(folder)
    tiny_tokenizer(eos="</s>").save_pretrained(folder)
    return folder


def recipe_of(
    tmp_path: Path, config: dict[str, Any] | Path = QWEN3_06B, *overrides: str, documents: int = 64
) -> Recipe:
    model = config if isinstance(config, Path) else model_folder(tmp_path / "model", config)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "x" * (99 + 100 * (i % 4))}) + "\n" for i in range(64)))
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {model}\noutput: {tmp_path / 'out'}\ndata: {{train: {rows}}}\n")
    return load_recipe(str(path), ["packing.tokens=1024", *overrides])


def plan(recipe: Recipe, device: str | None = "h200") -> tuple[dict[str, Any], bool, str]:
    said = io.StringIO()
    document, fits = command.plan(recipe, device=device, console=Console(file=said, width=200, markup=False))
    return json.loads(json.dumps(document, allow_nan=False)), fits, said.getvalue()


def decisions(document: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    return {item["name"]: (item["on"], item["reason"]) for item in document["decisions"]}
