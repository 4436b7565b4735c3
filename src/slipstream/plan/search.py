"""Where a recipe does not fit: the smallest changes that make it fit, what changes least first.

Each lever is one key of the recipe and the values that save memory, from the one nearest to what is asked. Combinations
of one, then two, then three levers are predicted, and the smallest number that fits anything wins. Of a number's
values the nearest that fits is searched for by halving, since less takes less memory; a faster but farther one would
compare another run: with ``train.steps`` given, shorter rows are faster because less is learned. What the schema
refuses is no lever, so what is not available yet is never proposed. Rows may become shorter only as far as the longest
document, unless overlong ones are cut anyway.

1. levers    ``_levers``    keys, and values to try
2. nearest   ``_nearest``   of each combination, as little changed as fits
3. order     ``_in_order``  what learns the same first, then by the time a token takes
4. costs     ``_costs``     what is learned less then
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from slipstream.data.account import counted
from slipstream.errors import InputError
from slipstream.memory.policy import MemoryOptions
from slipstream.plan.facts import Facts, Target
from slipstream.plan.prediction import Prediction, document_limit, predict
from slipstream.recipe import Recipe, recipe_from_dict
from slipstream.values import shown

MOST_CHANGES = 3
SHOWN = 6
"""How many ways are told."""
SHORTEST_ROW = 256
SMALLEST_RANK = 8
CUT = {"truncate": "cuts", "drop": "drops", "split": "splits"}
"""What ``data.overlong`` does to a document, in words."""


@dataclass(frozen=True)
class Change:
    """One key of the recipe, set to another value."""

    key: str
    value: Any

    def __str__(self) -> str:
        """As ``--set`` takes it."""
        return f"{self.key}={shown(self.value)}"


@dataclass(frozen=True)
class Remedy:
    """Changes that make a recipe fit, and what it comes to then."""

    changes: tuple[Change, ...]
    prediction: Prediction
    costs: tuple[str, ...] = ()
    """What is learned less, in words."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it changes."""
        return tuple(change.key for change in self.changes)


@dataclass(frozen=True)
class Lever:
    """One key, and values of it that save memory, each more than the one before."""

    key: str
    values: Sequence[Any]
    besides: tuple[Change, ...] = ()
    """What has no effect then, and has to be taken out."""

    def changes(self, at: int) -> tuple[Change, ...]:
        """The changes of its value ``at``."""
        return (Change(self.key, self.values[at]), *self.besides)


def remedies(recipe: Recipe, found: Facts, target: Target) -> list[Remedy]:
    """The ways that need the fewest changes; empty where no three changes are enough."""
    levers = [lever for lever in _levers(recipe, found, target) if lever.values]
    for count in range(1, MOST_CHANGES + 1):
        fitting = [
            nearest
            for chosen in combinations(levers, count)
            if len({lever.key for lever in chosen}) == count
            and (nearest := _nearest(recipe, chosen, found, target)) is not None
        ]
        if fitting:
            asked = predict(recipe, found, target)
            return [
                replace(remedy, costs=tuple(_costs(recipe, found, asked, remedy)))
                for remedy in _in_order(fitting)[:SHOWN]
            ]
    return []


# 2. nearest


def _nearest(recipe: Recipe, chosen: Sequence[Lever], found: Facts, target: Target) -> tuple[int, Remedy] | None:
    """The remedy by these levers of which none could be set nearer to what is asked, and how many values it is off."""
    at = [len(lever.values) - 1 for lever in chosen]

    def tried() -> Remedy | None:
        changes = (change for lever, where in zip(chosen, at, strict=True) for change in lever.changes(where))
        return _tried(recipe, tuple(changes), found, target)

    best = tried()
    if best is None:  # not even the farthest values of all
        return None
    for index, fits in enumerate(at):
        misses = -1
        while fits - misses > 1:
            at[index] = (fits + misses) // 2
            remedy = tried()
            if remedy is None:
                misses = at[index]
            else:
                best, fits = remedy, at[index]
        at[index] = fits
    return sum(at), best


def _tried(recipe: Recipe, changes: tuple[Change, ...], found: Facts, target: Target) -> Remedy | None:
    """The changed recipe's prediction, if it may be and fits."""
    try:
        prediction = predict(_changed(recipe, changes), found, target)
    except InputError:  # a value that these other options, the model or its device do not allow is no remedy
        return None
    return Remedy(changes, prediction) if prediction.fits else None


def _changed(recipe: Recipe, changes: tuple[Change, ...]) -> Recipe:
    tree = copy.deepcopy(recipe.to_dict())
    for change in changes:
        section, _, name = change.key.rpartition(".")
        (tree[section] if section else tree)[name] = change.value
    return recipe_from_dict(tree)


# 3. order


def _in_order(fitting: list[tuple[int, Remedy]]) -> list[Remedy]:
    """Of those that change the same keys only the nearest; what learns the same first, then by a token's time."""
    best: dict[str, Remedy] = {}
    for _, remedy in sorted(fitting, key=lambda found: (found[0], _token_seconds(found[1]))):
        best.setdefault(" ".join(key for key in remedy.keys if not _offloading(key)), remedy)
    return sorted(best.values(), key=lambda remedy: (_learns_otherwise(remedy), _token_seconds(remedy)))


def _offloading(key: str) -> bool:
    return key in ("memory.buffers", "memory.host_limit")


def _learns_otherwise(remedy: Remedy) -> bool:
    """Whether other numbers are learned: all but where activations are has a part in that."""
    return any(not key.startswith("memory.") for key in remedy.keys)


def _token_seconds(remedy: Remedy) -> float:
    return 1 / remedy.prediction.tokens_per_second


# 4. costs


def _costs(recipe: Recipe, found: Facts, asked: Prediction, remedy: Remedy) -> Iterator[str]:
    """What is learned less: tokens in as many steps, and ends of documents."""
    changed, then = _changed(recipe, remedy.changes), remedy.prediction
    share = _tokens(then) / _tokens(asked)
    if recipe.train.steps is not None and share < 0.995:
        yield f"learns {1 - share:.0%} fewer tokens in its {counted(then.steps, 'step')}"
    cut = int(np.count_nonzero(found.lengths > document_limit(changed)))
    if cut and recipe.data.overlong in CUT:
        yield f"{CUT[recipe.data.overlong]} {cut:,} of {counted(len(found.lengths), 'document')}"


def _tokens(prediction: Prediction) -> float:
    """Document tokens of the whole training."""
    return prediction.tokens_per_second * prediction.times.total * prediction.steps


# 1. levers


def _levers(recipe: Recipe, found: Facts, target: Target) -> Iterator[Lever]:
    """What saves memory; of several the first is kept nearest to what is asked: documents are cut rather late."""
    yield from _activations(recipe, target)
    yield Lever("packing.tokens", list(_shorter_rows(recipe, found)))
    yield Lever("packing.rows", range(recipe.packing.rows - 1, 0, -1))
    if recipe.adapter.kind == "none":
        yield Lever("train.optimizer", ["adamw8bit"])
        yield Lever("adapter.kind", ["lora"])
    else:
        yield Lever("load.quantize", ["nf4"])
        yield Lever("adapter.rank", list(_below(recipe.adapter.rank, SMALLEST_RANK)))
    if recipe.load.dtype == "float32":
        yield Lever("load.dtype", ["auto"])


def _activations(recipe: Recipe, target: Target) -> Iterator[Lever]:
    asked = recipe.memory.activations
    if asked != "recompute":
        yield Lever("memory.activations", ["recompute"], tuple(_of_offloading(recipe)))
    if target.device.kind == "cuda" and not target.device.unified_memory and asked != "offload":
        yield Lever("memory.activations", ["offload"])


def _of_offloading(recipe: Recipe) -> Iterator[Change]:
    """Takes the options of offloading out that were given: the schema refuses them where nothing is offloaded."""
    plain = MemoryOptions()
    for name in ("buffers", "host_limit"):
        if getattr(recipe.memory, name) != getattr(plain, name):
            yield Change(f"memory.{name}", getattr(plain, name))


def _shorter_rows(recipe: Recipe, found: Facts) -> Iterator[int]:
    """Tokens of shorter rows, as long as the longest document still fits or may be cut."""
    longest = found.longest if recipe.data.overlong == "error" else 0
    return _below(recipe.packing.tokens, max(SHORTEST_ROW, longest, recipe.data.max_length or 0))


def _below(asked: int, least: int) -> Iterator[int]:
    """Seven, six, five and four eighths of a number, the same of its half, and so on to ``least`` itself."""
    octave, value = asked, asked
    while octave > least:
        for eighths in (7, 6, 5, 4):
            if least < octave * eighths // 8 < value:
                yield (value := octave * eighths // 8)
        octave //= 2
    if least < asked:
        yield least
