"""Numbers of a model's configuration, whichever level they stand on, and what they say of random draws.

Models of several parts (text, vision, audio) nest a configuration for each, and what one top level says is a field of
``text_config`` in another. Who asks whether *anything* in a model draws random numbers looks at all of it; names are
all there is to go by, since functional dropout leaves no module to be found.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

RANDOM = re.compile(r"drop|jitter|noise")
"""Settings that make layers draw random numbers in training."""
ATTENTION_DROPOUT = re.compile(r"att.*drop")
"""Those that attention draws by, in all spellings: ``attention_dropout``, ``attn_pdrop``, ..."""


def numbers(settings: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Each number in ``settings`` (``config.to_dict()``), with the name of the nearest field; switches count as 0 or 1.

    A list's items go by the list's name.
    """
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from numbers(value, str(key))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from numbers(value, name)
    elif isinstance(settings, int | float):
        yield name, float(settings)


def draws_random(settings: Any) -> bool:
    """Whether a number in ``settings``, on any level, asks for random draws."""
    return any(value > 0 and RANDOM.search(name) for name, value in numbers(settings))


def draws_by_itself(module: object) -> bool:
    """Whether a number that a module has as its own, as taken over from a configuration, asks for random draws."""
    return any(isinstance(value, int | float) and value > 0 and RANDOM.search(k) for k, value in vars(module).items())


def attention_dropout(settings: Any) -> float:
    """The highest probability by which attention drops weights anywhere in ``settings``."""
    return max((value for name, value in numbers(settings) if ATTENTION_DROPOUT.search(name)), default=0.0)
