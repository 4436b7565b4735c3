"""YAML as a recipe means it.

YAML 1.1 reads ``2024-05-01`` as a date, ``1e-4`` as text, and lets a repeated key win in silence. A recipe wants text,
a number and an error, so the loader here leaves dates alone and duplicate keys are looked for in the node tree, where
line numbers are still known. YAML 1.2 parsers do some of this, at the price of one more dependency.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from slipstream.errors import InputError
from slipstream.values import kinds, shown

TIMESTAMP = "tag:yaml.org,2002:timestamp"
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers with an exponent; YAML 1.1 takes those without a dot or without a sign in the exponent for text."""


class RecipeLoader(yaml.SafeLoader):
    """PyYAML's safe loader without dates."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own spelling of a class-wide table
        first: [(tag, pattern) for tag, pattern in resolvers if tag != TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def parse(text: str, name: str) -> tuple[dict[Any, Any], list[str]]:
    """A recipe's text as a mapping, and the keys it gives twice; ``InputError`` if it is no YAML mapping."""
    loader = RecipeLoader(text)
    try:
        node = loader.get_single_node()
        duplicates = list(_duplicates(node, "", set())) if node is not None else []
        tree = {} if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: {_yaml_problem(error)}") from None
    finally:
        loader.dispose()
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise InputError(f"{name}: {shown(tree)} is not a recipe; write keys such as 'model: ...', one a line")
    return tree, duplicates


def parse_value(text: str, name: str) -> tuple[Any, str | None]:
    """One value as YAML, or the problem with it."""
    try:
        return yaml.load(text, RecipeLoader), None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return None, f"{name}: the value is not YAML ({_yaml_problem(error)}); put quotes around it"


def number_from_text(value: Any, hint: Any) -> Any:
    """``1e-4``, which YAML reads as text, as the number it is, where the field takes a number and no text."""
    taken = set(kinds(hint))
    if not isinstance(value, str) or str in taken or not EXPONENT.fullmatch(value):
        return value
    number = float(value)
    if float in taken:
        return number
    return int(number) if int in taken and number.is_integer() else value


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe's values by key, as ``--set`` spells them: ``{"train.seed": 0, ...}``."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and key != "fields":
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value
    return values


def _duplicates(node: yaml.Node, prefix: str, seen: set[int]) -> Iterator[str]:
    """Keys that one mapping of the document gives twice, with their lines; aliased nodes are looked at once."""
    if id(node) in seen or isinstance(node, yaml.ScalarNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _duplicates(item, prefix, seen)
        return
    first_line: dict[str, int] = {}
    for key, value in node.value:
        name, line = prefix + str(key.value), key.start_mark.line + 1
        if name in first_line:
            yield f"{name}: given twice (lines {first_line[name]} and {line}); remove one"
        first_line.setdefault(name, line)
        yield from _duplicates(value, f"{name}.", seen)


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{where}{problem}".replace("\n", " ")
