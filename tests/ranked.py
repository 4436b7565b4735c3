"""Runs of several ranks on the CPU, as a launcher starts them: ``python ranked.py FOLDER`` writes FOLDER/told.json.

One process loads the libraries; each rank is a fork of it with the environment that a launcher sets. As a launcher
does, what is left of a run is killed once one of its ranks has ended badly.
"""

import contextlib
import functools
import gc
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

import slipstream.run
from killed import at_call, die
from slipstream import InputError, Trainer
from slipstream.data.chunks import ChunkMaker
from slipstream.device import ceilings
from slipstream.errors import ToldElsewhereError
from slipstream.recipe import Recipe, load_recipe
from slipstream.train import run_folder
from slipstream.train.records import read_records
from tiny import tiny_model, tiny_tokenizer

ROWS = 13
"""An odd number: with two ranks one of them has a batch of nothing at the end of each epoch."""
EPOCHS = 2
STEPS = 14
TIED: dict[str, dict[str, Any]] = {
    "tied": {},
    "tied whole": {"adapter": {"rank": 4, "modules_to_save": ["embed_tokens"]}},
    "tied tokens": {"load": {"new_tokens": ["<think>", "</think>"]}},
    "tied full": {"adapter": {"kind": "none"}, "train__learning_rate": 0.001},
}
"""What is trained of a model with tied weights: adapters, a copy of the embedding, two of its rows, all weights."""
Arm = Callable[[], None]


def recipe_in(folder: Path, name: str, **changes: Any) -> Recipe:
    """A short run; keywords are recipe keys with ``__`` for the dot."""
    text = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl")},
        "adapter": {"rank": 4},
        "packing": {"tokens": 72},
        "train": {"epochs": EPOCHS, "learning_rate": 0.01, "eval_every": 4, "save_every": 3, "weight_decay": 0.01},
        "output": str(folder / "runs" / name),
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(text))
    return load_recipe(path, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()])


def write_inputs(folder: Path) -> None:
    torch.manual_seed(0)
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    for name, rows in (("train", ROWS), ("eval", 3)):
        lines = [{"prompt": f"What is {i}?", "completion": f" It is {i * i}." * (1 + i % 3)} for i in range(rows)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def rank(recipe: Recipe, resume: bool, arm: Arm | None, log: Path) -> int:
    """What one rank does; its exit code as the command line would give it. What it prints is in ``log``."""
    with log.open("a", buffering=1) as file, contextlib.redirect_stderr(file):
        try:
            if arm is not None:
                arm()
            summary = slipstream.run.train(recipe, resume=resume, console=Console(file=file, width=400))
        except ToldElsewhereError:
            return 2
        except InputError as error:
            file.write(f"InputError: {error}\n")
            return 2
        return 130 if summary.interrupted else 0


def start(index: int, count: int, port: int, work: Callable[[], int]) -> int:
    child = os.fork()
    if child:
        return child
    names = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    status = 1
    try:
        status = work()
    finally:
        if status == 1:
            import traceback

            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)


def ended(children: list[int]) -> list[int]:
    """Exit statuses, negative for signals; once one ends badly the others have two seconds."""
    statuses: dict[int, int] = {}
    deadline = None
    while len(statuses) < len(children):
        for child in set(children) - set(statuses):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = os.waitstatus_to_exitcode(status)
                if statuses[child] not in (0, 130):
                    deadline = deadline or time.monotonic() + 2
            elif deadline and time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return [statuses[child] for child in children]


def launch(
    recipes: list[Recipe], log: str, folder: Path, resume: bool = False, arms: dict[int, Arm] | None = None
) -> list[int]:
    """One run with a rank for each of ``recipes``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work(index: int) -> Callable[[], int]:
        arm = (arms or {}).get(index)
        return lambda: rank(recipes[index], resume, arm, folder / f"{log}.{index}.log")

    return ended([start(index, len(recipes), port, work(index)) for index in range(len(recipes))])


def ask(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def counted(folder: Path) -> Arm:
    """Each rank leaves a file for each time that it tokenises a row."""

    def arm() -> None:
        inner = ChunkMaker._rendered

        def rendered(maker: Any, row: Any) -> Any:
            with (folder / f"rendered.{os.environ['RANK']}").open("a") as file:
                file.write(f"{row.number}\n")
            return inner(maker, row)

        ChunkMaker._rendered = rendered  # type: ignore[method-assign]

    return arm


def exchanged() -> None:
    """As a recorded step does on cards."""
    inner = Trainer.exchange

    def exchange(trainer: Trainer) -> None:
        assert not isinstance(trainer.model_wrapped, DistributedDataParallel)
        inner(trainer)

    Trainer._exchanges = lambda *_: True  # type: ignore[method-assign]
    Trainer.exchange = exchange  # type: ignore[method-assign]


def given(name: str, place: int, value: Any) -> None:
    """``slipstream.run`` calls its function of this name with another argument at ``place``."""
    inner = getattr(slipstream.run, name)

    def called(*arguments: Any) -> Any:
        return inner(*arguments[:place], value, *arguments[place + 1 :])

    setattr(slipstream.run, name, called)


def begin_elsewhere(arm: Arm) -> None:
    """Trained weights that differ from the first rank's before training begins, and ``arm``."""
    arm()
    inner = Trainer._wrap_model

    def wrapped(trainer: Trainer, model: Any, *positional: Any, **named: Any) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * parameter.requires_grad)
        return inner(trainer, model, *positional, **named)

    Trainer._wrap_model = wrapped  # type: ignore[method-assign]


def tied_runs(run: Callable[..., None], folder: Path) -> None:
    """Divided runs of a model whose embedding is the head's own tensor, most killed and resumed, and one process's."""
    torch.manual_seed(0)
    tiny_model(tie_word_embeddings=True).save_pretrained(folder / "tied")
    tiny_tokenizer().save_pretrained(folder / "tied")
    common = {"model": str(folder / "tied"), "data__eval": None, "train__eval_every": None, "train__epochs": 1}
    for name, changes in TIED.items():
        several = {"train__sharding": "fsdp2", **common, **changes}
        if name != "tied":
            run(name, 2, arms={0: at_call(Trainer, "training_step", 5, die)}, **several)
        run(name, 2, resume=name != "tied", **several)
        run(f"{name} alone", 1, train__accumulate=2, train__save_every=None, **common, **changes)


def in_folder(place: Path) -> Arm:
    """A process started there, which doesn't look long for what others have written."""

    def arm() -> None:
        place.mkdir(exist_ok=True)
        os.chdir(place)
        run_folder.SEEN_WITHIN = 0.1

    return arm


def main(folder: Path) -> None:
    write_inputs(folder)
    slipstream.run.write_report = lambda path: path / "report.html"  # half of a run's time, and tested elsewhere
    PeftModel.create_or_update_model_card = lambda *_: None  # a template compiled in each save
    ceilings.measure = functools.cache(ceilings.measure)
    ceilings.measure(torch.device("cpu"))  # for all ranks of all runs
    gc.freeze()  # the forks needn't look through what is here
    told: dict[str, Any] = {}

    def run(name: str, count: int, log: str = "", resume: bool = False, arms: Any = None, **changes: Any) -> None:
        recipes = [recipe_in(folder, name, **changes)] * count
        told.setdefault(log or name, []).append(launch(recipes, log or name, folder, resume, arms))

    dropout = {"adapter__dropout": 0.2}
    run("two", 2, arms=dict.fromkeys(range(2), counted(folder)))
    run("one", 1, train__accumulate=2)
    padded = {"packing": {"enabled": False, "rows": 2}, "train__epochs": 1}
    run("three", 3, **padded)
    run("alone", 1, train__accumulate=3, **padded)
    run("never", 2, **dropout)
    run("killed", 2, arms={1: at_call(Trainer, "training_step", 11, die)}, **dropout)
    run("killed", 2, resume=True, **dropout)
    run("asked", 2, arms={1: at_call(Trainer, "training_step", 9, ask)}, **dropout)
    told["asked after"] = [step.step for step in read_records(folder / "runs/asked").steps]
    run("asked", 2, resume=True, **dropout)
    exchanging = {0: exchanged, 1: lambda: begin_elsewhere(exchanged)}
    run("exchanged", 2, arms=exchanging, train__accumulate=2)
    run("exchanged alone", 1, train__accumulate=4)
    divided = {"train__sharding": "fsdp2"}
    unsaved = {"train__save_every": None, "train__eval_every": None}  # gathering weights takes longer than training
    run("divided", 2, **dropout, **divided, **unsaved)
    half = dict.fromkeys(range(2), lambda: setattr(slipstream.run, "compute_dtype", lambda _: "bfloat16"))
    run("divided half", 2, arms=half, train__epochs=1, **divided, **unsaved)
    run("alone half", 1, arms=half, train__epochs=1, train__accumulate=2, **unsaved)
    full = {"adapter": {"kind": "none"}, "train__learning_rate": 0.001}
    run("full", 2, arms={0: at_call(Trainer, "training_step", 12, die)}, train__accumulate=2, **full, **divided)
    run("full", 2, resume=True, train__accumulate=2, **full, **divided)
    run("full alone", 1, train__accumulate=4, **full, **unsaved)
    tied_runs(run, folder)
    run("two", 1, "fewer", resume=True, train__epochs=3)
    others = [recipe_in(folder, "others", train__seed=index, adapter__rank=4 + index) for index in range(2)]
    told["others"] = [launch(others, "others", folder)]
    (folder / "other").mkdir()
    torch.manual_seed(1)
    tiny_model().save_pretrained(folder / "other")
    tiny_tokenizer().save_pretrained(folder / "other")
    elsewhere = recipe_in(folder, "weights", model=str(folder / "other"))
    run("weights", 2, arms={1: functools.partial(given, "build_model", 0, elsewhere)})
    for name, completion in (("many", " It is 1."), ("changed", " It is 2.")):
        pairs = [{"prompt": f"What is {i}?", "completion": completion if i == 1 else " It is."} for i in range(200)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    many = {"data__train": str(folder / "many.jsonl"), "data__eval": None, "train__eval_every": None}
    run("rows", 2, arms={1: functools.partial(given, "prepare_rows", 1, str(folder / "changed.jsonl"))}, **many)
    run("bad", 2, data__max_length=20)
    apart = {0: in_folder(folder / "here"), 1: in_folder(folder / "there")}
    for resume in (False, True):
        recipe = replace(recipe_in(folder, "apart"), output="apart")
        if resume:
            run_json = folder / "here/apart/run.json"
            run_json.write_text("{}")
        told.setdefault("apart", []).append(launch([recipe] * 2, "apart", folder, resume, apart))
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        main(Path(sys.argv[1]))
