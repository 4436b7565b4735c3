"""Where a recipe does not fit: the fewest changes that make it fit, the fastest first.

Each lever changes one key of the recipe one way, and takes out the options that have no effect then, which the schema
refuses. Combinations of one, then two, then three levers are predicted, and the smallest number that fits anything
wins. What the schema refuses even so is no lever, so what is not available yet is never proposed. Rows may become
shorter only as far as the longest document, unless overlong ones are cut anyway.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

from slipstream.errors import InputError
from slipstream.memory.policy import MemoryOptions
from slipstream.plan.facts import Facts, Target
from slipstream.plan.prediction import Prediction, predict
from slipstream.recipe import Recipe, recipe_from_dict
from slipstream.recipe_text import shown

MOST_CHANGES = 3
SHOWN = 3
"""How many ways are told."""
SHORTEST_ROW = 256


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


def remedies(recipe: Recipe, found: Facts, target: Target) -> list[Remedy]:
    """The ways that need the fewest changes, fastest first; empty where no three changes are enough."""
    levers = list(_levers(recipe, found, target))
    for count in range(1, MOST_CHANGES + 1):
        fitting = [
            remedy
            for chosen in combinations(levers, count)
            if len({lever[0].key for lever in chosen}) == count
            and (remedy := _tried(recipe, tuple(chain(*chosen)), found, target)) is not None
        ]
        if fitting:
            return _fastest(fitting)
    return []


def _fastest(fitting: list[Remedy]) -> list[Remedy]:
    """The best few: of those that change the same keys, only the fastest."""
    fitting.sort(key=lambda remedy: remedy.prediction.seconds)
    best: dict[tuple[str, ...], Remedy] = {}
    for remedy in fitting:
        best.setdefault(tuple(change.key for change in remedy.changes), remedy)
    return list(best.values())[:SHOWN]


def _tried(recipe: Recipe, changes: tuple[Change, ...], found: Facts, target: Target) -> Remedy | None:
    """The changed recipe's prediction, if it may be and fits."""
    tree = copy.deepcopy(recipe.to_dict())
    for change in changes:
        section, _, name = change.key.rpartition(".")
        (tree[section] if section else tree)[name] = change.value
    try:
        prediction = predict(recipe_from_dict(tree), found, target)
    except InputError:  # a value that these other options, the model or its device do not allow is no remedy
        return None
    return Remedy(changes, prediction) if prediction.fits else None


def _levers(recipe: Recipe, found: Facts, target: Target) -> Iterator[tuple[Change, ...]]:
    """What saves memory, each the change of one key and what has to go with it, from what costs least."""
    if recipe.memory.activations != "recompute":
        yield (Change("memory.activations", "recompute"), *_of_offloading(recipe))
    yield from ((change,) for change in _single(recipe, found, target))


def _of_offloading(recipe: Recipe) -> Iterator[Change]:
    """Takes the options of offloading out that were given: the schema refuses them where nothing is offloaded."""
    plain = MemoryOptions()
    for name in ("buffers", "host_limit"):
        if getattr(recipe.memory, name) != getattr(plain, name):
            yield Change(f"memory.{name}", getattr(plain, name))


def _single(recipe: Recipe, found: Facts, target: Target) -> Iterator[Change]:
    """Levers of one key."""
    offloads = target.device.kind == "cuda" and not target.device.unified_memory
    if offloads and recipe.memory.activations != "offload":
        yield Change("memory.activations", "offload")
    if recipe.packing.rows > 1:
        yield Change("packing.rows", 1)
    yield from (Change("packing.tokens", tokens) for tokens in _shorter_rows(recipe, found))
    if recipe.adapter.kind == "none":
        yield Change("train.optimizer", "adamw8bit")
        yield Change("adapter.kind", "lora")
    else:
        yield Change("load.quantize", "nf4")
        yield from (Change("adapter.rank", rank) for rank in (64, 32, 16, 8) if rank < recipe.adapter.rank)
    if recipe.load.dtype == "float32":
        yield Change("load.dtype", "auto")


def _shorter_rows(recipe: Recipe, found: Facts) -> Iterator[int]:
    """Half, a quarter ... of the row, as long as the longest document still fits or may be cut."""
    longest = int(found.lengths.max()) if recipe.data.overlong == "error" else 0
    tokens = recipe.packing.tokens // 2
    while tokens >= max(SHORTEST_ROW, longest, recipe.data.max_length or 0):
        yield tokens
        tokens //= 2
