"""Every recipe in the repository parses, tells its launch command, and goes the whole road with a tiny model."""

import io
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.data.formats import recognise
from slipstream.data.rows import DataOptions, RawRow
from slipstream.recipe import load_recipe
from slipstream.run import train
from tiny import tiny_model, tiny_tokenizer

FORMATS = ["messages", "prompt-completion", "instruction", "text"]
RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


def test_there_are_recipes() -> None:
    assert {"demo", "qwen3-0.6b-lora", "qwen3-14b-qlora", "smollm2-full"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_tells_its_launch_command(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.output.startswith("runs/")
    header = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"slipstream train recipes/{path.name}" in header


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_rows_it_needs(path: Path) -> None:
    header = path.read_text(encoding="utf-8").split("\n\n")[0]
    examples = [json.loads(line[1:]) for line in header.splitlines() if line.startswith("#     {")]
    formats = [recognise(RawRow(1, None, row), DataOptions(train="")) for row in examples]
    assert formats == (["prompt-completion"] if path.stem == "demo" else FORMATS)
    file = load_recipe(path).data.train
    assert file in header or (path.stem == "demo" and "demo/demo.py makes the rows" in header)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_goes_the_whole_road(path: Path, base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    pairs = [{"prompt": f"{i} + {i}", "completion": str(2 * i)} for i in range(40)]
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    overrides = [f"model={base}", f"data.train={rows}", f"data.eval={rows}", f"output={tmp_path / 'run'}"]
    short = ["train.steps=2", "packing.tokens=256", "load.dtype=float32", "train.learning_rate=0.01"]
    no_extras = ["load.quantize=none", "train.optimizer=adamw"]  # four bits need a card
    recipe = load_recipe(path, [*overrides, *short, *no_extras])
    summary = train(recipe, resume=False, console=Console(file=io.StringIO()))

    assert summary.steps == 2
    plan = json.loads((tmp_path / "run" / "run.json").read_text())["plan"]
    assert plan["device_bytes"] == pytest.approx(sum(part["bytes"] for part in plan["memory"]["device"]), abs=20)
    assert plan["step_seconds"] > plan["floor_seconds"] > 0
    assert "Plan and run" in summary.report.read_text(encoding="utf-8")
    assert summary.eval_before is not None
    assert summary.eval_after is not None
    assert summary.eval_after < summary.eval_before  # it was evaluated on what it learned
    original = AutoModelForCausalLM.from_pretrained(base)
    if recipe.adapter.kind == "lora":
        result = tmp_path / "run" / "adapter"
        tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), result)
    else:
        result = tmp_path / "run" / "model"
        tuned = AutoModelForCausalLM.from_pretrained(result)
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert not torch.allclose(tuned(input_ids=ids).logits, original(input_ids=ids).logits)
    assert AutoTokenizer.from_pretrained(result).chat_template == tiny_tokenizer().chat_template


@pytest.mark.parametrize(
    ("asked", "kept"),
    [("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}", None), ("none", "")],
    ids=["inline", "none"],
)
def test_the_tuned_model_is_asked_by_the_template_it_was_taught_with(
    asked: str, kept: str | None, base: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}?", "completion": "yes"}) + "\n" for i in range(20)))
    template = tmp_path / "template.jinja"
    template.write_text(asked)
    given = asked if asked == "none" else str(template)
    overrides = [f"model={base}", f"data.train={rows}", f"output={tmp_path / 'run'}", f"data.chat_template={given}"]
    short = ["train.steps=1", "packing.tokens=128", "data.eval=null", "load.dtype=float32"]
    recipe = load_recipe(RECIPES[0], [*overrides, *short])
    train(recipe, resume=False, console=Console(file=io.StringIO()))
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "adapter").chat_template
    assert (saved or "") == (asked if kept is None else kept)
