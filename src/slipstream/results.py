"""What a run has made, put to use.

``generate`` tries it, ``merge`` makes it a model folder of its own. Both take what the run has: the result of a
finished run, the last checkpoint of one that isn't, and say so. The alternative, to refuse the latter, keeps people
from trying a long run half-way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console

from slipstream.cost.hardware import Device, compute_dtype
from slipstream.errors import InputError
from slipstream.model.base_weights import TrainedOn, check_base, check_named_base
from slipstream.model.generate import generate_text
from slipstream.model.load import CONFIG_FILE, LoadOptions, load, load_model, load_tokenizer, stored_dtype
from slipstream.model.lora import load_adapter
from slipstream.model.merge import (
    MergedDtype,
    merge_adapter,
    save_model,
    unused_folder,
    weight_bytes,
    written_whole,
)
from slipstream.model.new_tokens import fit_vocabulary
from slipstream.model.quantize import dequantise, quantised_modules
from slipstream.prepare import quiet_libraries
from slipstream.recipe import Recipe, recipe_from_dict
from slipstream.train.checkpoint import last_checkpoint
from slipstream.train.fingerprints import recorded_bases, recorded_digest
from slipstream.train.records import RunFolder, checked_run


@dataclass(frozen=True)
class MergeSummary:
    """What ``merge`` wrote."""

    out: str
    """The model folder."""
    source: str
    """The adapter, model or checkpoint it was made from."""
    base: str
    """The model that was tuned."""
    finished: bool
    """Whether the run had finished; otherwise ``source`` is its last checkpoint."""
    dtype: str
    parameters: int
    weight_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def generate(
    run_folder: str,
    *,
    prompt: str,
    system: str | None,
    max_tokens: int,
    temperature: float,
    seed: int,
    console: Console,
) -> str:
    """Answer ``prompt`` with the model a run has tuned (an interrupted run: with its last checkpoint), or with one that
    ``merge`` wrote. An answer that is empty is told.
    """
    quiet_libraries()
    model, tokenizer = _tuned(Path(run_folder), console)
    answer = generate_text(
        model, tokenizer, prompt, system=system, max_tokens=max_tokens, temperature=temperature, seed=seed
    )
    if not answer:
        console.print("the answer is empty: the model ended it at once, or wrote nothing but blanks and special tokens")
    return answer


def _tuned(path: Path, console: Console) -> tuple[Any, Any]:
    """The model to try and its tokenizer."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (path / CONFIG_FILE).is_file() and not RunFolder(path).run_json.exists():
        return load(str(path), LoadOptions(), device=device)
    folder = RunFolder.open(path)
    recipe = recipe_of(folder)
    source, _ = tuned_weights(folder, recipe, console)
    trained = _trained_on(folder, recipe, source)
    tokenizer = load_tokenizer(str(source), recipe.load)
    if trained is None:
        return load_model(str(source), replace(recipe.load, revision=None), device=device), tokenizer
    with _base_told(recipe):
        base = load_model(recipe.model, recipe.load, device=device)
    fit_vocabulary(base, tokenizer)
    _check_base(base, source, trained, recipe, console)
    return load_adapter(base, source), tokenizer


def merge(run_folder: str, out: str, *, dtype: MergedDtype | None, console: Console) -> MergeSummary:
    """Write what a run has tuned as one model folder, which plain transformers loads; on the CPU.

    ``dtype``: of its weights, the base checkpoint's if None. Raises ``InputError``.
    """
    quiet_libraries()
    folder = RunFolder.open(Path(run_folder))
    target = unused_folder(Path(out))
    recipe = recipe_of(folder)
    source, finished = tuned_weights(folder, recipe, console)
    trained = _trained_on(folder, recipe, source)
    with written_whole(target) as built:
        tokenizer = load_tokenizer(str(source), recipe.load)
        console.print(f"merging {source} into {recipe.model}" if trained else f"reading {source}")
        if trained is None:
            model = _converted(folder, recipe, source, dtype)
        else:
            model = _merged(folder, recipe, (source, trained), tokenizer, dtype, console)
        save_model(model, tokenizer, built)
    summary = MergeSummary(
        out=str(target),
        source=str(source),
        base=recipe.model,
        finished=finished,
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=weight_bytes(model),
    )
    console.print(f"{summary.parameters:,} parameters in {summary.dtype} saved in {target}")
    return summary


def recipe_of(folder: RunFolder) -> Recipe:
    """The recipe that a run was started with. ``InputError`` where ``run.json`` is of another format, or lacks it."""
    return recipe_from_dict(checked_run(folder, "recipe.model")["recipe"])


def tuned_weights(folder: RunFolder, recipe: Recipe, console: Console) -> tuple[Path, bool]:
    """The folder of what a run has tuned, and whether it had finished; if not, its last checkpoint, and it is said."""
    result = folder.adapter if _is_lora(recipe) else folder.model
    if result.is_dir():
        return result, True
    try:
        checkpoint = last_checkpoint(folder.checkpoints, console.print)
    except InputError as error:
        raise InputError(
            f"'{folder.path}' has no {result.name} yet, and no whole checkpoint ({error}); "
            "let it train to its end, or to a checkpoint (train.save_every)"
        ) from error
    console.print(f"the run isn't finished: using {checkpoint}")
    return checkpoint, False


def _is_lora(recipe: Recipe) -> bool:
    return recipe.adapter.kind == "lora"


def _trained_on(folder: RunFolder, recipe: Recipe, adapter: Path) -> TrainedOn | None:
    """What the run's adapter was trained on, None for a run without one; ``InputError`` where it names another base."""
    if not _is_lora(recipe):
        return None
    record = checked_run(folder, "parameters.total", "parameters.trainable")
    names = (recipe.model, *recorded_bases(record))
    check_named_base(adapter, names)
    parameters = record["parameters"]
    base_parameters = parameters["total"] - parameters["trainable"]  # a run with an adapter trains what it adds
    return TrainedOn(names, base_parameters, recorded_digest(record))


def _check_base(base: Any, adapter: Path, trained: TrainedOn, recipe: Recipe, console: Console) -> None:
    if told := check_base(base, adapter, trained, recipe.load.revision):
        console.print(told)


def _merged(
    folder: RunFolder,
    recipe: Recipe,
    source: tuple[Path, TrainedOn],
    tokenizer: Any,
    dtype: MergedDtype | None,
    console: Console,
) -> Any:
    """The base with the adapter: added to as it is stored where that is the dtype asked for, else in float32."""
    record = checked_run(folder, "device")
    adapter, trained = source
    with _base_told(recipe):
        stored = _base_dtype(recipe, record)
    wanted = dtype or stored
    base = _plain_base(recipe, record, wanted, stored)
    fit_vocabulary(base, tokenizer)
    _check_base(base, adapter, trained, recipe, console)
    return merge_adapter(base, adapter, dtype=wanted, base_parameters=trained.parameters)


def _plain_base(recipe: Recipe, record: dict[str, Any], wanted: MergedDtype, stored: MergedDtype) -> Any:
    """The base with plain weights: as they are stored, or what their four-bit codes stand for.

    Where the run rounded them to four bits, the original weights would be nearer to the model's own; but the adapter
    has learned to make up for the difference, and only the rounded ones give the logits that the run had. They are made
    on a card where there is one, as in training.
    """
    if recipe.load.quantize == "none":
        device, dtype = torch.device("cpu"), wanted if wanted == stored else "float32"
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = _trained_dtype(recipe, record)
    base = load_model(recipe.model, replace(recipe.load, dtype=dtype), device=device)
    if quantised_modules(base):  # also where the checkpoint itself is four-bit
        return dequantise(base, getattr(torch, dtype if dtype == wanted else "float32"))
    return base


def _converted(folder: RunFolder, recipe: Recipe, model: Path, dtype: MergedDtype | None) -> Any:
    """The fully tuned model; its base is asked for nothing but its dtype."""
    with _base_told(recipe, "give the merged model's --dtype"):
        wanted = dtype or _base_dtype(recipe, checked_run(folder, "device"))
    return load_model(str(model), replace(recipe.load, revision=None, dtype=wanted))


@contextmanager
def _base_told(recipe: Recipe, remedy: str = "") -> Iterator[None]:
    """Say of a base model that can't be loaded that it is the run's, and what to do where it is not in its place."""
    try:
        yield
    except InputError as error:
        base = Path(recipe.model)
        if not base.is_absolute() or base.exists():
            also = f"; or {remedy}" if remedy else ""
            raise InputError(f"the run's base model is not to be had: {error}{also}") from error
        remedies = ["put it back", "set a link to it there", *([remedy] if remedy else [])]
        raise InputError(
            f"the run's base model {base} does not exist any more; {', '.join(remedies[:-1])}, or {remedies[-1]}"
        ) from error


def _base_dtype(recipe: Recipe, record: dict[str, Any]) -> MergedDtype:
    """The base checkpoint's dtype; the one it was trained in where the checkpoint names none (a GGUF file doesn't)."""
    stored = stored_dtype(recipe.model, recipe.load)
    return cast(MergedDtype, stored) if stored else _trained_dtype(recipe, record)


def _trained_dtype(recipe: Recipe, record: dict[str, Any]) -> MergedDtype:
    """The dtype that the run computed in."""
    auto = recipe.load.dtype == "auto"
    return cast(MergedDtype, compute_dtype(Device(**record["device"])) if auto else recipe.load.dtype)
