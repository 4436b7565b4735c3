"""``slipstream plan``: read the data and the configuration, predict, and say what to change where it does not fit."""

from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from slipstream.cost.shape import unmodelled
from slipstream.data.learn import use_template
from slipstream.decision import Decision
from slipstream.model.attention import Needs
from slipstream.model.lora import check_adapter, left_out
from slipstream.model.new_tokens import new_token_ids
from slipstream.model.quantize import check_card
from slipstream.model.tiled_mlp import check_tiles
from slipstream.plan.facts import Facts, Target, facts, skeleton, target, untiled, with_new_tokens
from slipstream.plan.partial import partial_plan
from slipstream.plan.prediction import Gain, Prediction, choices, gains, predict
from slipstream.plan.search import Remedy, remedies
from slipstream.plan.table import show
from slipstream.prepare import (
    check_here,
    check_packing,
    checked_tokenizer,
    new_tokens_decision,
    quiet_libraries,
    stream_decision,
    tokenised_set,
)
from slipstream.recipe import Recipe
from slipstream.train.options import check_schedule, idle_start
from slipstream.transform import packed_needs


def plan(recipe: Recipe, *, device: str | None, console: Console) -> tuple[dict[str, Any], bool]:
    """The plan of a recipe as plain values, printed too, and whether it fits (as far as it is known).

    ``device``: a known device's name or a file that ``doctor --json`` wrote; None for this machine's. Nothing of the
    model but its configuration is read. Raises ``InputError``.
    """
    quiet_libraries()
    aim = target(device)
    _check_device(recipe, aim)
    model = skeleton(recipe)
    tokenizer = checked_tokenizer(recipe)
    packed = check_model(recipe, model, tokenizer)
    tokens = with_new_tokens(recipe, model, tokenizer)
    train = tokenised_set(recipe, recipe.data.train, tokenizer, console)
    held_out = tokenised_set(recipe, recipe.data.eval, tokenizer, console) if recipe.data.eval else None
    use_template(tokenizer, recipe.data.chat_template)
    possible = (new_tokens_decision(recipe), left_out(model, recipe.adapter), stream_decision(recipe))
    told = [one for one in possible if one is not None]
    reason = None if recipe.packing.enabled else unmodelled(model.config)
    if reason is not None:
        document, lines = partial_plan(recipe, model, reason, aim, train, tokens, told)
        for line in lines:
            console.print(line)
        return document, document["fits"] is not False
    found = facts(recipe, model, train, held_out, packed, tokens=tokens)
    prediction = _with(predict(recipe, found, aim), tuple(told))
    check_schedule(recipe.train, prediction.steps)
    if (idle := idle_start(recipe.train, prediction.steps)) is not None:
        prediction = _with(prediction, (idle,))
    saved = gains(recipe, prediction, aim)
    ways = [] if prediction.fits else remedies(recipe, found, aim)
    document = document_of(recipe, found, aim, prediction, saved, ways)
    show(document, prediction, saved, ways, console)
    return document, prediction.fits


def _check_device(recipe: Recipe, aim: Target) -> None:
    """What training would refuse on this device; which packages another machine has is not known here."""
    if aim.here:
        check_here(recipe)
    check_card(recipe.load.quantize, has_card=aim.device.kind == "cuda")


def check_model(recipe: Recipe, model: Any, tokenizer: Any) -> tuple[Decision, Needs | None] | None:
    """Raises ``InputError`` for what a recipe asks of a model that has no storage, and can't be had.

    Returns what ``packed_needs`` says of it; None for a recipe that doesn't pack.
    """
    packed = packed_needs(model) if recipe.packing.enabled else None
    if packed is not None:
        check_packing(recipe, packed[0])
    if recipe.adapter.kind == "lora":
        check_adapter(model, recipe.adapter, new_token_ids(model, tokenizer, recipe.load.new_tokens))
    check_tiles(recipe.memory.tiles, untiled(recipe.adapter, model))
    if recipe.train.sharding != "none":
        from slipstream.train.sharding import layers_to_divide  # brings FSDP2, which other plans need not wait for

        layers_to_divide(model)
    return packed


def _with(prediction: Prediction, decisions: tuple[Decision, ...]) -> Prediction:
    return replace(prediction, decisions=(*prediction.decisions, *decisions))


def document_of(
    recipe: Recipe, found: Facts, aim: Target, prediction: Prediction, saved: list[Gain], ways: list[Remedy]
) -> dict[str, Any]:
    """The plan for a machine to read."""
    return {
        "fits": prediction.fits,
        "model": recipe.model,
        "parameters": {"total": found.shape.parameters, "trained": prediction.job.trained},
        "device": asdict(aim.device),
        "free_bytes": aim.free,
        "ceilings": asdict(aim.rates),
        "data": found.account,
        "packing": {**asdict(prediction.packing), "padded_ratio": prediction.packing.padded_ratio},
        **prediction.record(),
        "gains": [asdict(gain) for gain in saved],
        "decisions": [asdict(decision) for decision in prediction.decisions],
        "remedies": [
            {
                "changes": {change.key: change.value for change in way.changes},
                "device_bytes": round(way.prediction.memory.device_bytes),
                "seconds": way.prediction.seconds,
                "costs": list(way.costs),
                "choices": choices(way.prediction.job),
            }
            for way in ways
        ],
    }
