"""The prediction that a run carries in its records, so that its report can show it beside what was measured.

Training decides for itself; the prediction is of what it decided, not of what a plan would have.
"""

from collections.abc import Sequence
from typing import Any

from slipstream.data.tokens import TokenisedSet
from slipstream.errors import InputError
from slipstream.plan.facts import Facts, Target, facts
from slipstream.plan.prediction import Taken, predict
from slipstream.plan.table import seconds_text
from slipstream.recipe import Recipe
from slipstream.report.numbers import bytes_text, time_text


def run_facts(
    recipe: Recipe, model: Any, sets: tuple[TokenisedSet, TokenisedSet | None], *, tokens: Sequence[int] = ()
) -> Facts | InputError:
    """What a run's prediction starts from: ``model`` (without storage), ``sets`` (training and held-out), and the
    ``tokens`` whose rows are learned.

    A model whose sizes can't be read is no reason not to train it: then what is missing.
    """
    try:
        return facts(recipe, model, *sets, tokens=tokens)
    except InputError as error:
        return error


def run_plan(recipe: Recipe, found: Facts | InputError, target: Target, taken: Taken) -> dict[str, Any]:
    """The prediction for a run that has decided so; the record says what is ``missing`` where there is none."""
    if isinstance(found, InputError):
        return {"missing": str(found)}
    try:
        prediction = predict(recipe, found, target, taken)
    except InputError as error:
        return {"missing": str(error)}
    return {**prediction.record(), "ceilings": target.rates.source}


def plan_line(plan: dict[str, Any]) -> str:
    """The prediction in a sentence."""
    if "missing" in plan:
        return f"no prediction: {plan['missing']}"
    return (
        f"predicted: {bytes_text(plan['device_bytes'])} at the peak, {seconds_text(plan['step_seconds'])} a step, "
        f"{time_text(plan['seconds'])} in all, compiling not counted"
    )
