"""What a field of options takes, in words, and whether a value is among it.

A field's annotation says which values it takes, once: recipes, ``Options`` and the pages made from recipes all read it
here, so that a wrong value is refused with the same words wherever it comes from.
"""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", types.NoneType: "null"}


def checked(key: str, value: Any, hint: Any) -> tuple[Any, list[str]]:
    """The value of the field ``key``, if its type and bounds allow it; else the problem, with what they would allow."""
    adapter: TypeAdapter[Any] = TypeAdapter(hint, config=STRICT)
    try:
        return adapter.validate_python(value), []
    except ValidationError:
        return None, [f"{key}: {_refusal(value, hint)}"]


def _refusal(value: Any, hint: Any) -> str:
    if isinstance(value, int | float) and str in kinds(hint):
        return (
            f"{shown(value)} is read as {'a switch' if isinstance(value, bool) else 'a number'}; put quotes around it"
        )
    return f"{shown(value)} does not fit; give {expected(hint)}"


def shown(value: Any) -> str:
    """A value as the user would write it in YAML, on one line and not too long; as Python would, where YAML can't."""
    try:
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    except yaml.representer.RepresenterError:  # nothing that a recipe could hold
        text = repr(value)
    text = text.removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= 80 else text[:77] + "..."


def expected(hint: Any) -> str:
    """What a field takes, in words: ``a whole number > 0, or null``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = " and ".join(filter(None, map(_bound, arguments[1:])))
        return f"{expected(arguments[0])} {bounds}".rstrip()
    if origin is Literal:
        return shown(arguments[0]) if len(arguments) == 1 else "one of " + ", ".join(map(shown, arguments))
    if origin in (Union, types.UnionType):
        return ", or ".join(map(expected, arguments))
    if origin is list:
        return f"a list, each item {expected(arguments[0])}"
    if origin is dict:
        return f"a mapping of {' to '.join(map(expected, arguments))}"
    return WORDS[hint]


def _bound(bound: Any) -> str:
    """One bound of the ``annotated_types`` kind; other annotations say nothing of the value."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return "".join(f"{sign} {getattr(bound, name):,}" for name, sign in signs.items() if hasattr(bound, name))


def kinds(hint: Any) -> Iterator[Any]:
    """The plain types a field takes, below annotations and unions."""
    if get_origin(hint) in (Annotated, Union, types.UnionType):
        for argument in get_args(hint):
            yield from kinds(argument)
    else:
        yield hint
