"""The recipe: one YAML file that says everything about a run, checked before anything is loaded.

The stages own their options; this file composes them and holds what concerns several at once. Every field is checked
by pydantic in strict mode, one field at a time, so that all problems are found together and told with the key as the
user spells it. The alternative, validating the whole tree in one call, is shorter, but words its errors in terms of
Python types and cannot name a misspelt key's neighbour.

Relative paths in a recipe are relative to the current directory, as on every command line, not to the recipe's folder.

    1. read    ``recipe_text.parse``   text → mapping; syntax, duplicate keys
    2. merge   ``_override``           ``--set a.b=v`` into the mapping
    3. fields  ``_section``            unknown keys, types, values, missing keys
    4. whole   ``Recipe``              what two options together may not say
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from slipstream.data.packing import MOST_TOKENS, PackingOptions
from slipstream.data.rows import DataOptions
from slipstream.errors import InputError
from slipstream.memory.policy import MemoryOptions
from slipstream.model.load import LoadOptions
from slipstream.model.lora import AdapterOptions
from slipstream.recipe_text import number_from_text, parse, parse_value
from slipstream.train.options import TrainOptions
from slipstream.values import checked, shown

SECTIONS: Mapping[str, type] = {
    "load": LoadOptions,
    "adapter": AdapterOptions,
    "data": DataOptions,
    "packing": PackingOptions,
    "train": TrainOptions,
    "memory": MemoryOptions,
}
REQUIRED: Mapping[str, str] = {
    "model": "a hub id, a local folder or a GGUF file",
    "data.train": "a local file or folder of rows, or a hub data set",
    "output": "the folder to write the run to, e.g. runs/first",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run. Constructing one checks that its options fit together; ``InputError`` lists all that do not."""

    model: str
    """A hub id, a local folder, or a GGUF file."""
    load: LoadOptions = field(default_factory=LoadOptions)
    adapter: AdapterOptions = field(default_factory=AdapterOptions)
    data: DataOptions
    packing: PackingOptions = field(default_factory=PackingOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    output: str
    """The run's folder."""

    def __post_init__(self) -> None:
        problems = [
            *_adapter_conflicts(self.adapter),
            *_weight_conflicts(self),
            *_length_conflicts(self),
            *_schedule_conflicts(self),
            *_memory_conflicts(self.memory),
            *_sharding_conflicts(self),
        ]
        if problems:
            raise InputError("; ".join(problems))

    def to_dict(self) -> dict[str, Any]:
        """The recipe with every default spelt out, as plain dicts, lists and scalars."""
        return asdict(self)

    def to_yaml(self) -> str:
        """The recipe as YAML that ``load_recipe`` reads back to an equal one."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, apply overrides such as ``"train.steps=20"`` (values are YAML), and check the result.

    Raises ``InputError`` with every problem found, each under its dotted key.
    """
    tree, problems = parse(_read(path), str(path))
    for override in overrides:
        problems += _override(tree, override)
    return _recipe(tree, problems, str(path))


def recipe_from_dict(tree: Mapping[str, Any], name: str = "recipe") -> Recipe:
    """The recipe that ``Recipe.to_dict`` gave, e.g. from a run's records; ``name`` opens the ``InputError`` message."""
    return _recipe(tree, [], name)


def _recipe(tree: Mapping[Any, Any], problems: list[str], name: str) -> Recipe:
    values, found = _fields_of(Recipe, tree, "")
    problems = [*problems, *found]
    if problems:
        raise InputError(_joined(name, problems))
    try:
        return Recipe(**values)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give the path of a recipe (YAML)") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder; give the recipe file in it") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; save the recipe as UTF-8 text") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def _joined(name: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return f"{name}: {problems[0]}"
    return "\n  ".join([f"{name}: {len(problems)} problems", *problems])


# Overrides


def _override(tree: dict[str, Any], override: str) -> list[str]:
    """Set one ``a.b=v`` in the tree, in place; gives the problems it found."""
    key, equals, text = override.partition("=")
    *sections, last = parts = key.strip().split(".")
    if not equals or not all(parts):
        return [f"--set {override}: not of the form key=value; e.g. --set train.steps=20"]
    node = tree
    for depth, name in enumerate(sections, start=1):
        if node.get(name) is None:
            node[name] = {}
        node = node[name]
        if not isinstance(node, dict):
            return [f"--set {override}: {'.'.join(sections[:depth])} is {shown(node)}, which has no keys"]
    value, problem = parse_value(text, f"--set {override}")
    node[last] = value
    return [problem] if problem else []


# Fields


def _fields_of(cls: type, tree: Mapping[Any, Any], prefix: str) -> tuple[dict[str, Any], list[str]]:
    """Check a mapping against a dataclass's fields: the checked values, and the problems found."""
    declared = {item.name: item for item in fields(cls)}
    problems = [_unknown(str(key), prefix, list(declared)) for key in tree if key not in declared]
    hints = get_type_hints(cls, include_extras=True)
    values: dict[str, Any] = {}
    for name, item in declared.items():
        key = prefix + name
        if key in SECTIONS:
            values[name], found = _section(key, tree.get(name))
        elif key in REQUIRED and _blank(tree.get(name)):
            found = [f"{key}: missing; give {REQUIRED[key]}"]
        elif name in tree:
            values[name], found = checked(key, number_from_text(tree[name], hints[name]), hints[name])
        else:
            assert not _is_required(item), f"{key} has no default and is not in REQUIRED"
            continue
        problems += found
    return values, problems


def _section(key: str, value: Any) -> tuple[Any, list[str]]:
    """One section's options object (none if it has problems); a section left empty takes its defaults."""
    if value is not None and not isinstance(value, dict):
        names = ", ".join(item.name for item in fields(SECTIONS[key]))
        return None, [f"{key}: {shown(value)} is not a section; indent its keys below it ({names})"]
    values, problems = _fields_of(SECTIONS[key], value or {}, f"{key}.")
    return (None if problems else SECTIONS[key](**values)), problems


def _unknown(name: str, prefix: str, known: list[str]) -> str:
    """Point from an unknown key to the same key elsewhere, else to the nearest here, else to the nearest elsewhere."""
    everywhere = [f"{section}.{item.name}" for section, cls in SECTIONS.items() for item in fields(cls)]
    everywhere += [item.name for item in fields(Recipe) if item.name not in SECTIONS]
    exact = [key for key in everywhere if key.rpartition(".")[2] == name]
    here = [prefix + match for match in get_close_matches(name, known, n=1)]
    leaves = get_close_matches(name, [key.rpartition(".")[2] for key in everywhere], n=1)
    elsewhere = [key for key in everywhere if key.rpartition(".")[2] in leaves]
    candidates = exact or here or elsewhere
    remedy = f"did you mean {' or '.join(candidates)}?" if candidates else f"the keys here are {', '.join(known)}"
    return f"{prefix}{name}: unknown key; {remedy}"


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _is_required(item: "Field[Any]") -> bool:
    return item.default is MISSING and item.default_factory is MISSING


# What two options together may not say


def _adapter_conflicts(adapter: AdapterOptions) -> Iterator[str]:
    """Options of the adapter that were changed although there is none."""
    if adapter.kind != "none":
        return
    plain = AdapterOptions(kind="none")
    for item in fields(adapter):
        value = getattr(adapter, item.name)
        if value != getattr(plain, item.name):
            yield f"adapter.{item.name}: {shown(value)} has no effect with adapter.kind: none; remove one of them"


def _weight_conflicts(recipe: Recipe) -> Iterator[str]:
    """What trained weights can't be held in."""
    load, adapter, optimizer = recipe.load, recipe.adapter, recipe.train.optimizer
    if adapter.kind == "none" and load.quantize != "none":
        yield (
            f"load.quantize: {load.quantize} holds frozen weights, and adapter.kind: none trains them all; "
            "set adapter.kind: lora or load.quantize: none"
        )
    if optimizer != "adamw8bit":
        return
    loses = "small updates would round away: adamw8bit keeps no float32 masters"
    if adapter.kind == "none" and load.dtype in ("bfloat16", "float16"):
        yield f"load.dtype: {load.dtype} is trained whole and {loses}; leave it out, or take train.optimizer: adamw"
    if adapter.modules_to_save and load.dtype != "float32":
        yield (
            f"adapter.modules_to_save: {shown(adapter.modules_to_save)} may be held in half precision, where {loses}; "
            "take train.optimizer: adamw, or load.dtype: float32"
        )


def _length_conflicts(recipe: Recipe) -> Iterator[str]:
    limit, tokens = recipe.data.max_length, recipe.packing.tokens
    if tokens * recipe.packing.rows > MOST_TOKENS:
        yield (
            f"packing.tokens {shown(tokens)} x packing.rows {shown(recipe.packing.rows)} > {MOST_TOKENS:,}: boundaries "
            "are 32-bit numbers; lower either"
        )
    if limit is not None and limit > tokens:
        yield (
            f"data.max_length: {limit:,} > packing.tokens {tokens:,}, so such a document fits in no row; "
            "raise packing.tokens or lower data.max_length"
        )
    if recipe.packing.window is not None and not recipe.packing.enabled:
        yield f"packing.window: {recipe.packing.window} has no effect with packing.enabled: false; remove it"


def _schedule_conflicts(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    if train.warmup >= 1 and train.warmup != int(train.warmup):
        yield (
            f"train.warmup: {train.warmup} is neither a share of the steps (below 1) nor a whole number of them; "
            "give one of these"
        )
    if train.steps is not None and train.warmup >= max(1, train.steps):
        yield (
            f"train.warmup: {train.warmup:g} steps >= train.steps {train.steps}, so the learning rate would never "
            "reach its peak; lower train.warmup or raise train.steps"
        )
    if train.eval_every is not None and recipe.data.eval is None:
        yield f"train.eval_every: {train.eval_every} needs held-out rows; give data.eval or remove it"


def _sharding_conflicts(recipe: Recipe) -> Iterator[str]:
    """What can't be divided over processes."""
    if recipe.train.sharding == "none":
        return
    for key, value in (("load.quantize", recipe.load.quantize), ("train.optimizer", recipe.train.optimizer)):
        if value in ("nf4", "adamw8bit"):
            yield (
                f"train.sharding: {recipe.train.sharding} can't divide what {key}: {value} packs; set train.sharding: "
                f"none, or {key}: {'none' if value == 'nf4' else 'adamw'}"
            )


def _memory_conflicts(memory: MemoryOptions) -> Iterator[str]:
    """Options of offloading that were given although nothing is offloaded."""
    if memory.activations in ("auto", "offload"):
        return
    plain = MemoryOptions()
    for name in ("buffers", "host_limit"):
        value = getattr(memory, name)
        if value != getattr(plain, name):
            yield (
                f"memory.{name}: {shown(value)} has no effect with memory.activations: {memory.activations}; "
                f"remove one of them"
            )
