"""Runs that are killed at chosen moments with SIGKILL and go on: ``python killed.py FOLDER`` writes FOLDER/told.json.

One process trains to the end; each attempt is a fork of it that starts, or resumes, a run. What kills it stands at a
chosen call, so that every moment is met, and always the same.
"""

import functools
import gc
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from rich.console import Console

import slipstream.run
import slipstream.train.checkpoint
import slipstream.train.trainer
from slipstream import InputError, Trainer
from slipstream.device import ceilings
from slipstream.recipe import Recipe, load_recipe
from slipstream.train.records import LineLog, to_line
from tiny import tiny_model, tiny_tokenizer

STEPS = 11
"""The data's 7 packed rows make epochs of 4 steps, the last of one batch only; the last checkpoint is within one."""
Arm = Callable[[], None]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(owner: Any, name: str, number: int, act: Callable[..., None] = die, when: Any = None) -> Arm:
    """Arms ``owner.name``: ``act`` comes before its ``number``-th call (of those for which ``when`` is true)."""

    def arm() -> None:
        inner, calls = getattr(owner, name), [0]

        def armed(*arguments: Any, **named: Any) -> Any:
            calls[0] += when is None or bool(when(*arguments, **named))
            if calls[0] == number:
                act(*arguments, **named)
            return inner(*arguments, **named)

        setattr(owner, name, armed)

    return arm


def half_file(_: Any, path: Any, *__: Any, **___: Any) -> None:
    Path(path).write_bytes(b"PK\x03\x04 half of it")
    die()


def half_manifest(path: Path, text: str) -> None:
    path.with_name(f".{path.name}.{os.getpid()}.tmp").write_text(text[:99])
    die()


def half_line(log: LineLog, record: Any) -> None:
    with log.path.open("a") as file:
        file.write(to_line(record)[:40])
    die()


def half_removed(path: Path, **_: Any) -> None:
    next(path.glob("checkpoint-*/optimizer.pt")).unlink()
    die()


def half_result(_: Any, path: Any, **__: Any) -> None:
    Path(path).mkdir(parents=True, exist_ok=True)
    (Path(path) / "adapter_model.safetensors").write_bytes(b"half")
    die()


trainer, checkpoint = slipstream.train.trainer, slipstream.train.checkpoint
of_optimizer = lambda _, path, *__, **___: str(path).endswith("optimizer.pt")  # noqa: E731
of_removal = lambda path, **_: Path(path).name == ".removing" and any(Path(path).glob("*"))  # noqa: E731
of_adapter = lambda _, path, **__: Path(path).name == "adapter"  # noqa: E731
of_steps = lambda log, _: log.path.name == "steps.jsonl"  # noqa: E731
PeftModel = peft.PeftModel

MOMENTS: dict[str, list[Arm]] = {
    "between two batches of a step": [at_call(Trainer, "training_step", 10)],
    "before an optimizer step": [at_call(torch.optim.AdamW, "step", 8)],
    "in a line of steps.jsonl": [at_call(LineLog, "append", 8, half_line, of_steps)],
    "in an evaluation": [at_call(Trainer, "_eval_sums", 3)],
    "after the weights": [at_call(Trainer, "_save_optimizer_and_scheduler", 3)],
    "in the optimizer's file": [at_call(torch, "save", 3, half_file, of_optimizer)],
    "before the random state": [at_call(Trainer, "_save_rng_state", 2)],
    "before the manifest": [at_call(trainer, "write_manifest", 2)],
    "in the manifest": [at_call(checkpoint, "write_atomically", 3, half_manifest)],
    "before the move": [at_call(trainer, "publish", 2)],
    "after the move": [at_call(trainer, "rotate", 2)],
    "in a removal": [at_call(shutil, "rmtree", 1, half_removed, of_removal)],
    "before the result": [at_call(slipstream.run._Training, "_save_result", 1)],
    "in the result": [at_call(PeftModel, "save_pretrained", 1, half_result, of_adapter)],
    "three times": [
        at_call(Trainer, "training_step", 15),
        at_call(trainer, "write_manifest", 1),
        at_call(LineLog, "cut_after", 2),
    ],
}
"""What kills the first attempt, the second, ...; one more then goes to the end."""


def recipe_in(folder: Path, name: str) -> Recipe:
    """A short run with all that a checkpoint must keep: dropout, shuffled epochs, accumulation, evaluations."""
    text = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl")},
        "adapter": {"rank": 4, "dropout": 0.2},
        "packing": {"tokens": 64},
        "train": {
            "steps": STEPS,
            "accumulate": 2,
            "learning_rate": 0.01,
            "eval_every": 4,
            "save_every": 3,
            "keep": 1,
            "weight_decay": 0.01,
        },
        "output": str(folder / "runs" / name),
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(text))
    return load_recipe(path, [])


def write_inputs(folder: Path) -> None:
    torch.manual_seed(0)
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    for name, rows in (("train", 7), ("eval", 2)):
        lines = [json.dumps({"prompt": f"What is {i}?", "completion": f" It is {i * i}." * 2}) for i in range(rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def attempt(recipe: Recipe, resume: bool, arm: Arm | None, log: Path) -> int:
    """One fork that trains. Returns its exit status, negative for a signal; what it printed is in ``log``."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    with log.open("a", buffering=1) as file:
        try:
            if arm is not None:
                arm()
            slipstream.run.train(recipe, resume=resume, console=Console(file=file, width=400))
            status = 0
        except InputError as error:
            file.write(f"InputError: {error}\n")
            status = 2
        finally:
            if status == 1:
                import traceback

                traceback.print_exc(file=file)
            os._exit(status)


def damage_newest(recipe: Recipe) -> None:
    newest = max((Path(recipe.output) / "checkpoints").glob("checkpoint-*"), key=checkpoint.checkpoint_step)
    file = newest / "optimizer.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def no_random_state() -> None:
    Trainer._load_rng_state = lambda *_: None


def main(folder: Path) -> None:
    write_inputs(folder)
    told: dict[str, list[int]] = {}

    def run(name: str, attempts: list[Arm | None], between: Callable[[Recipe], None] | None = None) -> None:
        recipe, statuses = recipe_in(folder, name), []
        for number, arm in enumerate(attempts):
            if number and between is not None:
                between(recipe)
            statuses.append(attempt(recipe, bool(number), arm, folder / f"{name}.log"))
        told[name] = statuses

    slipstream.run.write_report = lambda path: path / "report.html"  # half of an attempt's time, and tested elsewhere
    PeftModel.create_or_update_model_card = lambda *_: None  # a template compiled in each save
    ceilings.measure = functools.cache(ceilings.measure)  # by the first run, and not by each fork again
    (folder / "runs").mkdir()
    slipstream.run.train(recipe_in(folder, "never"), resume=False, console=Console(file=io.StringIO()))
    gc.freeze()  # the forks needn't look through what is here
    for name, arms in MOMENTS.items():
        run(name, [*arms, None])
    run("damaged", [at_call(Trainer, "training_step", 15), None], damage_newest)
    run("without its random state", [at_call(Trainer, "training_step", 10), no_random_state])
    run("too early", [at_call(Trainer, "training_step", 3), None])
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
