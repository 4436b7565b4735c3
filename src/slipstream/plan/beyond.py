"""What training refuses before it reads weights: a step that several machines like this one could not hold.

Why: beyond its memory a CPU's process is ended by the system, or takes the machine with it, and says nothing. A
prediction may be wrong, and a run that might fit must be tried: only what is predicted to take ``WIDE`` times all the
memory there is, free or not, is refused. Less than that is told by the allocator (``train/no_memory.py``). Alternative:
refusing whatever a plan says does not fit, which stops runs for the sake of a few percent.
"""

from slipstream.errors import InputError
from slipstream.plan.facts import Facts, Target
from slipstream.plan.prediction import Prediction, predict
from slipstream.plan.search import remedies
from slipstream.recipe import Recipe
from slipstream.report.numbers import bytes_text

WIDE = 4
"""Times the device's whole memory; its swap space, and what predictions have been off, are well within."""


def check_within_reach(recipe: Recipe, found: Facts, target: Target) -> None:
    """Raises ``InputError`` for a step predicted to take more than ``WIDE`` times the memory of the device, with the
    least change that makes it fit. Not where processes divide the weights: predictions are for one that has all.
    """
    if recipe.train.sharding != "none":
        return
    try:
        prediction = predict(recipe, found, target)
    except InputError:  # no prediction is no reason not to train; the record says why there is none
        return
    if prediction.memory.device_bytes > WIDE * target.device.memory_bytes:
        raise InputError(
            f"a step of {prediction.job.tokens:,} tokens takes about "
            f"{bytes_text(prediction.memory.device_bytes)}, more than {WIDE} times all the "
            f"{bytes_text(target.device.memory_bytes)} of {target.device.name}, most of it for "
            f"{_largest(prediction)}; {_remedy(recipe, found, target)}"
        )


def _largest(prediction: Prediction) -> str:
    largest = max(prediction.memory.device, key=lambda part: part.bytes)
    return f"the {largest.name} ({bytes_text(largest.bytes)})"


def _remedy(recipe: Recipe, found: Facts, target: Target) -> str:
    ways = remedies(recipe, found, target)
    if not ways:
        return "no three changes of this recipe make it fit: take a smaller model, or a larger device"
    flags = " ".join(f"--set {change}" for change in ways[0].changes)
    return f"it fits with {flags} (slipstream plan shows more)"
