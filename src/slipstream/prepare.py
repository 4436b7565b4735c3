"""What a recipe names, made ready: packed rows, and a model with its adapter.

``train``, ``data`` and whatever else starts from a recipe share these stages, so that what ``data`` shows is what
``train`` learns from.
"""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import torch
import transformers
from rich.console import Console

from slipstream.data.packing import PackingReport, pack, pack_dataset
from slipstream.data.tokens import TokenisedSet, tokenise
from slipstream.errors import InputError
from slipstream.model.load import load_model
from slipstream.model.lora import add_adapter
from slipstream.recipe import Recipe
from slipstream.transform import packing_decision


@dataclass(frozen=True)
class Rows:
    """One data set, ready to train on."""

    tokenised: TokenisedSet
    rows: datasets.Dataset
    """Packed rows, or documents where packing is off."""
    report: PackingReport
    histogram: dict[str, list[int]]


def prepare_rows(recipe: Recipe, source: str, tokenizer: Any, console: Console) -> Rows:
    """Read, tokenise and pack ``source``, and print what became of it."""
    with console.status(f"reading {source}") if console.is_terminal else nullcontext():
        max_length = recipe.data.max_length or recipe.packing.tokens
        tokenised = tokenise(source, recipe.data, tokenizer, max_length=max_length)
        lengths = tokenised.lengths
        capacity, seed, window = recipe.packing.tokens, recipe.train.seed, recipe.packing.window
        packed = pack(lengths, capacity, seed=seed, window=window)
        rows = pack_dataset(tokenised.documents, capacity, seed=seed, window=window)
    report = PackingReport.of(lengths, packed, capacity)
    console.print(f"{source}:")
    for line in tokenised.account.lines():
        console.print(f"  {line}")
    if not recipe.packing.enabled:
        console.print(f"  not packed: {report.documents:,} documents, one a row, padded")
        return Rows(tokenised, tokenised.documents, report, length_histogram(lengths))
    console.print(
        f"  packed into {report.rows:,} rows of {capacity:,} tokens: {report.fill:.1%} full, "
        f"{report.padding_tokens:,} tokens of padding (padded batches: {report.padded_tokens:,} tokens in all, "
        f"{report.padded_tokens / report.tokens:.2f}x)"
    )
    return Rows(tokenised, rows, report, length_histogram(lengths))


def build_model(recipe: Recipe, device: torch.device) -> Any:
    """The base model on ``device``, with its adapter where the recipe has one."""
    model = load_model(recipe.model, recipe.load, trainable=recipe.adapter.kind == "none", device=device)
    if recipe.packing.enabled:
        possible = packing_decision(model)
        if not possible.on:
            raise InputError(f"{recipe.model} can't be trained packed: {possible.reason}")
    if recipe.adapter.kind == "lora":
        model = add_adapter(model, recipe.adapter, seed=recipe.train.seed)
    return model


def length_histogram(lengths: npt.NDArray[np.int64]) -> dict[str, list[int]]:
    """Documents by length in tokens: ``edges`` (one more than ``counts``) and ``counts``."""
    counts, edges = np.histogram(lengths, bins=min(24, max(1, len(np.unique(lengths)))))
    return {"edges": [round(edge) for edge in edges], "counts": counts.tolist()}


def quiet_libraries() -> None:
    """Keep the libraries' own bars and notices out of the way; warnings and errors stay."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    # peft asks for a property that newer transformers have renamed; nothing a user could do about it
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
