"""Which of a recipe's values are paths, and what they are from any folder.

A recipe's relative paths are relative to where a command is called. What a run records outlives that place: it is read
from elsewhere by ``generate``, ``merge`` and ``train --resume``, so paths are recorded absolute. Links in them stay, so
that one may be set anew; names on the hub stay names. Alternative: paths relative to the run's folder, which survive
moving both together, and are nothing that a user could paste.
"""

import os
from dataclasses import replace
from pathlib import Path

from slipstream.recipe import Recipe

PATHS = ("model", "data.train", "data.eval", "data.chat_template")
"""Keys whose values may be paths; the run's own folder is wherever it is found."""


def is_there(value: str) -> bool:
    """Whether a value names a file or folder here."""
    return Path(value).expanduser().exists()


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with those of its paths absolute that exist; others are names on the hub, or templates."""
    return with_values(recipe, {key: absolute(value) for key, value in paths(recipe).items() if is_there(value)})


def absolute(path: str) -> str:
    """A path as it is from any folder."""
    return os.path.abspath(os.path.expanduser(path))


def paths(recipe: Recipe) -> dict[str, str]:
    """Those of ``PATHS`` that are given and may be paths: a chat template may also be none, or the text itself."""
    data, template = recipe.data, recipe.data.chat_template
    inline = template is None or template == "none" or "{" in template or "\n" in template
    values = (recipe.model, data.train, data.eval, None if inline else template)
    return {key: value for key, value in zip(PATHS, values, strict=True) if value is not None}


def with_values(recipe: Recipe, values: dict[str, str]) -> Recipe:
    """The recipe with other values for some of ``PATHS``."""
    data = replace(
        recipe.data,
        train=values.get("data.train", recipe.data.train),
        eval=values.get("data.eval", recipe.data.eval),
        chat_template=values.get("data.chat_template", recipe.data.chat_template),
    )
    return replace(recipe, model=values.get("model", recipe.model), data=data)
