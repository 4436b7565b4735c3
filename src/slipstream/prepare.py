"""What a recipe names, made ready: packed rows, and a model with its adapter.

``train``, ``data`` and whatever else starts from a recipe share these stages, so that what ``data`` shows is what
``train`` learns from.
"""

import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from slipstream.data.account import counted
from slipstream.data.packing import PackingReport, pack_rows, packed
from slipstream.data.rows import lies_here
from slipstream.data.tokens import Progress, TokenisedSet, tokenise
from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.model.load import load_config, load_model, load_tokenizer
from slipstream.model.lora import add_adapter
from slipstream.model.new_tokens import check_vocabulary, fit_vocabulary, new_token_ids
from slipstream.model.quantize import check_quantize, quantize_decisions
from slipstream.recipe import Recipe
from slipstream.report.numbers import percent_text
from slipstream.train.options import check_optimizer, check_trackers
from slipstream.transform import decisions, packing_decision

if TYPE_CHECKING:
    import datasets

LINE_EVERY_SECONDS = 10.0
UNPACKED: Mapping[str, Decision] = MappingProxyType(
    {
        "packing": Decision("packing", False, "packing.enabled: false; documents are padded, one a row"),
        "attention": Decision("attention", False, "the model's own: packing.enabled is false"),
    }
)
"""What is decided, by name, where a recipe switches packing off."""


@dataclass(frozen=True)
class Rows:
    """One data set, ready to train on."""

    tokenised: TokenisedSet
    rows: "datasets.Dataset"
    """Packed rows, or documents where packing is off."""
    report: PackingReport
    histogram: dict[str, list[int]]


def prepare_rows(recipe: Recipe, source: str, tokenizer: Any, console: Console) -> Rows:
    """Read, tokenise and pack ``source``, and print what became of it."""
    with _status(source, console) as progress:
        tokenised = _tokenised(recipe, source, tokenizer, progress)
        lengths = tokenised.lengths
        rows, report = _packed(recipe, tokenised, lengths)
    _tell(source, tokenised, console)
    console.print(f"  {_packing_line(report, recipe.packing.rows)}")
    return Rows(tokenised, rows, report, length_histogram(lengths))


def tokenised_set(recipe: Recipe, source: str, tokenizer: Any, console: Console) -> TokenisedSet:
    """Read and tokenise ``source`` as for training, without packing it, and print what became of it."""
    with _status(source, console) as progress:
        tokenised = _tokenised(recipe, source, tokenizer, progress)
    _tell(source, tokenised, console)
    return tokenised


def _tokenised(recipe: Recipe, source: str, tokenizer: Any, progress: Progress) -> TokenisedSet:
    max_length = recipe.data.max_length or recipe.packing.tokens
    return tokenise(source, recipe.data, tokenizer, max_length=max_length, progress=progress)


def _tell(source: str, tokenised: TokenisedSet, console: Console) -> None:
    console.print(f"{source}:")
    if tokenised.files:
        console.print(f"  {_files_line(tokenised.files)}")
    for line in tokenised.account.lines():
        console.print(f"  {line}")


def _files_line(files: tuple[str, ...]) -> str:
    named, more = ", ".join(files[:10]), len(files) - 10
    return f"{counted(len(files), 'file')}: {named}" + (f" and {more:,} more" if more > 0 else "")


@contextmanager
def _status(source: str, console: Console) -> Iterator[Progress]:
    """A progress bar on a terminal, a line now and then elsewhere; and what tells it how many rows are read."""
    if not console.is_terminal:
        yield _lines(source, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rows]}"), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"reading {source}", total=None, rows="")

        def tell(rows: int, total: int | None) -> None:
            bar.update(task, completed=rows, total=total, rows=_of(rows, total))

        yield tell


def _lines(source: str, console: Console) -> Progress:
    """Tells how far reading is, at most every ten seconds."""
    last = [time.monotonic()]

    def tell(rows: int, total: int | None) -> None:
        if time.monotonic() - last[0] > LINE_EVERY_SECONDS:
            last[0] = time.monotonic()
            console.print(f"reading {source}: {_of(rows, total)}")

    return tell


def _of(rows: int, total: int | None) -> str:
    return counted(rows, "row") if total is None else f"{rows:,} of {counted(total, 'row')}"


def _packed(
    recipe: Recipe, tokenised: TokenisedSet, lengths: npt.NDArray[np.int64]
) -> "tuple[datasets.Dataset, PackingReport]":
    """Packed rows and what packing achieved; the documents themselves and what padding costs, where it is off."""
    options, seed = recipe.packing, recipe.train.seed
    if not options.enabled:
        return tokenised.documents, PackingReport.unpacked(lengths, options.rows, options.tokens)
    rows = pack_rows(tokenised.documents, options.tokens, seed=seed, window=options.window)
    same = packed(lengths, options.tokens, seed=seed, window=options.window)
    return rows, PackingReport.of(lengths, same, options.tokens)


def _packing_line(report: PackingReport, batch: int) -> str:
    if report.enabled:
        return (
            f"packed into {counted(report.rows, 'row')} of {report.capacity:,} tokens: {percent_text(report.fill)} "
            f"full, {counted(report.padding_tokens, 'token')} of padding (padded batches would compute "
            f"{report.padded_tokens:,} tokens, {report.padded_ratio:.2f} times as many)"
        )
    documents = f"not packed: {counted(report.documents, 'document')}, one a row"
    if batch == 1:
        return f"{documents} and a batch, so nothing is padded"
    return (
        f"{documents}, padded in batches of {batch:,}: about {1 - report.fill:.1%} of the tokens computed are padding"
    )


def data_record(prepared: Rows) -> dict[str, Any]:
    """The ``account`` of a data set and what ``packing`` achieved, as plain values."""
    packing = {**asdict(prepared.report), "length_histogram": prepared.histogram}
    return {"account": prepared.tokenised.account.as_json(), "packing": packing}


def build_model(recipe: Recipe, device: torch.device) -> Any:
    """The base model on ``device``, with its adapter where the recipe has one."""
    model = load_model(recipe.model, recipe.load, trainable=trained_in_place(recipe), device=device)
    tokenizer = load_tokenizer(recipe.model, recipe.load)
    tokens = new_token_ids(model, tokenizer, recipe.load.new_tokens)
    fit_vocabulary(model, tokenizer)
    if recipe.packing.enabled:
        check_packing(recipe, packing_decision(model))
    if recipe.adapter.kind == "lora":
        model = add_adapter(model, recipe.adapter, seed=recipe.train.seed, new_tokens=tokens)
    return model


def checked_tokenizer(recipe: Recipe) -> Any:
    """The recipe's tokenizer; ``InputError`` where the model has no embedding for tokens of its own vocabulary."""
    config = load_config(recipe.model, recipe.load)  # first: tokenizers are loaded by it, whatever it says
    tokenizer = load_tokenizer(recipe.model, recipe.load)
    check_vocabulary(config, tokenizer, recipe.model)
    return tokenizer


def check_here(recipe: Recipe) -> None:
    """Raises ``InputError`` for what a recipe asks for and this machine lacks; asked before anything is read."""
    check_trackers(recipe.train)
    check_quantize(recipe.load.quantize, has_card=torch.cuda.is_available())
    check_optimizer(recipe.train)


def check_packing(recipe: Recipe, possible: Decision) -> None:
    """Raises ``InputError`` for a recipe that packs, where that is not ``possible`` for the model."""
    if not possible.on:
        raise InputError(f"{recipe.model} can't be trained packed: {possible.reason}")


def run_decisions(recipe: Recipe, model: Any) -> list[Decision]:
    """What was decided about a loaded model: by ``apply``, corrected by what the recipe switches off, and before."""
    decided, told = decisions(model), new_tokens_decision(recipe)
    if not recipe.packing.enabled:
        decided = [UNPACKED.get(decision.name, decision) for decision in decided]
    return [*decided, *([] if told is None else [told]), *quantize_decisions(model)]


def stream_decision(recipe: Recipe) -> Decision | None:
    """That ``data.stream`` does nothing for data that lies here; None where it isn't asked for, or all is the hub's."""
    named = [source for source in (recipe.data.train, recipe.data.eval) if source is not None and lies_here(source)]
    if not recipe.data.stream or not named:
        return None
    return Decision(
        "stream",
        False,
        f"{' and '.join(dict.fromkeys(named))} lies here: data.stream is for hub data sets, and files are read a "
        "bounded number of rows at a time without it",
    )


def new_tokens_decision(recipe: Recipe) -> Decision | None:
    """What becomes of ``load.new_tokens``, and which of them are no new ones; None where none are named."""
    named = recipe.load.new_tokens
    if not named:
        return None
    vocabulary = load_tokenizer(recipe.model, replace(recipe.load, new_tokens=[])).get_vocab()
    old = [token for token in named if token in vocabulary]
    reason = f"{counted(len(named) - len(old), 'token')} added to the vocabulary"
    if old:
        reason += f"; there already, and trained as they are: {', '.join(old)}"
    return Decision("new tokens", len(old) < len(named), reason)


def trained_in_place(recipe: Recipe) -> bool:
    """Whether an optimizer without masters of its own updates the weights, which then are best kept in float32."""
    return recipe.adapter.kind == "none" and recipe.train.optimizer != "adamw"  # which keeps masters of its own


def planned_steps(recipe: Recipe, rows: int, processes: int = 1) -> int:
    """Optimizer steps of a run over ``rows`` packed rows (documents, where packing is off), as the trainer counts."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    updates = math.ceil(math.ceil(rows / (recipe.packing.rows * processes)) / recipe.train.accumulate)
    return math.ceil(recipe.train.epochs * updates)


def length_histogram(lengths: npt.NDArray[np.int64]) -> dict[str, list[int]]:
    """Documents by length in tokens: ``edges`` (one more than ``counts``) and ``counts``."""
    counts, edges = np.histogram(lengths, bins=min(24, max(1, len(np.unique(lengths)))))
    return {"edges": [round(edge) for edge in edges], "counts": counts.tolist()}


def quiet_libraries() -> None:
    """Keep the libraries' own bars and notices out of the way; warnings and errors stay."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when it is imported
    if (loaded := sys.modules.get("datasets")) is not None:
        loaded.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    # peft asks for a property that newer transformers have renamed; nothing a user could do about it
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    # accelerate passes on an argument of DistributedDataParallel that the newest torch has renamed
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
    # peft warns of merging an adapter on a shared tensor; model/merge.py parts embedding and head before
    warnings.filterwarnings("ignore", message="(?s)Model has `tie_word_embeddings=True`", category=UserWarning)
    # and peft looks for the configuration of a GGUF base beside the file; the vocabulary is known not to have changed
    warnings.filterwarnings("ignore", message=r"Could not find a config file in .*", category=UserWarning)
