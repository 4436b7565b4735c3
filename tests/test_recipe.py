"""Recipes: what is accepted, and how everything else is told, in the user's spelling."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.data.rows import DataOptions
from slipstream.errors import InputError
from slipstream.model.lora import AdapterOptions
from slipstream.recipe import REQUIRED, SECTIONS, Recipe, load_recipe, recipe_from_dict
from slipstream.train.options import TrainOptions

MINIMAL = "model: some/model\ndata: {train: rows.jsonl}\noutput: runs/first\n"
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def problem(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


# What is accepted


def test_everything_but_three_keys_has_a_default(write: Write) -> None:
    recipe = load_recipe(write(MINIMAL))
    assert recipe == Recipe(model="some/model", data=DataOptions(train="rows.jsonl"), output="runs/first")
    assert recipe.adapter == AdapterOptions()


def test_every_section_is_read(write: Write) -> None:
    text = """
        model: m.gguf
        load: {revision: main, dtype: float32, trust_remote_code: true}
        adapter: {kind: lora, rank: 4, alpha: 8.5, targets: [q_proj, v_proj], rslora: on}
        data: {train: a.jsonl, eval: b.jsonl, fields: {prompt: question}, max_length: 64, overlong: split}
        packing: {tokens: 128, rows: 2, window: 50}
        train: {steps: 10, warmup: 2, eval_every: 5, trackers: [wandb]}
        memory: {activations: recompute}
        output: runs/x
    """
    recipe = load_recipe(write(text))
    assert (recipe.adapter.rank, recipe.adapter.alpha, recipe.adapter.rslora) == (4, 8.5, True)
    assert recipe.adapter.targets == ["q_proj", "v_proj"]
    assert recipe.data.fields == {"prompt": "question"}
    assert (recipe.packing.rows, recipe.train.trackers, recipe.memory.activations) == (2, ["wandb"], "recompute")


def test_a_section_with_nothing_below_it_takes_its_defaults(write: Write) -> None:
    recipe = load_recipe(write(MINIMAL + "packing:\n  # tokens: 8192\n"))
    assert recipe.packing.tokens == 4096


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "1e-04", "0.0001", "1E-4", ".1e-3"])
def test_numbers_with_an_exponent_are_numbers(write: Write, text: str) -> None:
    assert load_recipe(write(MINIMAL + f"train: {{learning_rate: {text}}}")).train.learning_rate == 1e-4
    assert load_recipe(write(MINIMAL), [f"train.learning_rate={text}"]).train.learning_rate == 1e-4


def test_whole_numbers_with_an_exponent_are_whole(write: Write) -> None:
    assert load_recipe(write(MINIMAL), ["train.steps=1e3"]).train.steps == 1000
    assert "train.steps: 1e-3 does not fit" in problem(write(MINIMAL), "train.steps=1e-3")


def test_text_that_looks_like_a_date_or_a_number_with_exponent_stays_text(write: Write) -> None:
    recipe = load_recipe(write(MINIMAL + "load: {revision: 12345e10}"), ["output=2026-01-31"])
    assert (recipe.load.revision, recipe.output) == ("12345e10", "2026-01-31")


def test_overrides_set_keys_lists_and_mappings_and_the_last_wins(write: Write) -> None:
    overrides = [
        "packing.tokens=64",
        "packing.tokens=32",
        "adapter.targets=[q_proj]",
        "data.fields.prompt=question",
        "data.eval=",
        "model=other",
    ]
    recipe = load_recipe(write(MINIMAL + "memory:\n"), overrides)
    assert (recipe.packing.tokens, recipe.adapter.targets, recipe.model) == (32, ["q_proj"], "other")
    assert (recipe.data.fields, recipe.data.eval) == ({"prompt": "question"}, None)


def test_a_value_may_hold_an_equals_sign(write: Write) -> None:
    assert load_recipe(write(MINIMAL), ["data.train=a=b.jsonl"]).data.train == "a=b.jsonl"


def test_yaml_and_dict_hold_every_default_and_come_back_equal(write: Write) -> None:
    recipe = load_recipe(
        write(MINIMAL), ["train.learning_rate=1e-5", "data.fields.prompt=frage ä", "adapter.kind=none"]
    )
    assert load_recipe(write(recipe.to_yaml())) == recipe
    assert recipe_from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert recipe.to_dict()["packing"] == {"enabled": True, "tokens": 4096, "rows": 1, "window": None}
    assert list(recipe.to_dict()) == ["model", "load", "adapter", "data", "packing", "train", "memory", "output"]


def test_records_that_are_no_recipe_are_told_under_their_name() -> None:
    with pytest.raises(InputError, match=r"^run\.json: 3 problems\n  model: missing"):
        recipe_from_dict({}, "run.json")


def test_every_field_without_a_default_is_named_as_required() -> None:
    assert set(REQUIRED) == {"model", "data.train", "output"}
    assert set(SECTIONS) < set(Recipe.__dataclass_fields__)


# Files and syntax


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert problem(tmp_path / "no.yaml") == f"{tmp_path / 'no.yaml'}: no such file; give the path of a recipe (YAML)"
    assert "is a folder; give the recipe file in it" in problem(tmp_path)


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"model: \xff\n")
    assert "byte 7 is not UTF-8" in problem(path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(write: Write) -> None:
    assert load_recipe(write("\ufeff" + MINIMAL)).model == "some/model"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model: [a\nb: 2\n", "line 2, column 2: "),
        ("model: a\n\tb: 2\n", "line 2, column 1: "),
        ("model: a\n---\nmodel: b\n", "line 2, column 1: "),
        ("model: !!python/object:os.system x\n", "line 1, column 8: "),
        ("- a\n- b\n", "[a, b] is not a recipe"),
        ("just text\n", "just text is not a recipe"),
        ("model: !!int x\n", "invalid literal"),
    ],
)
def test_what_is_no_yaml_mapping(write: Write, text: str, told: str) -> None:
    assert told in problem(write(text))


def test_an_empty_file_lacks_the_required_keys(write: Write) -> None:
    message = problem(write(""))
    assert "3 problems" in message
    assert all(f"\n  {key}: missing; give " in message for key in REQUIRED)


def test_a_key_given_twice(write: Write) -> None:
    message = problem(write(MINIMAL + "packing:\n  tokens: 64\n  tokens: 128\noutput: other\n"))
    assert "packing.tokens: given twice (lines 5 and 6); remove one" in message
    assert "output: given twice (lines 3 and 7); remove one" in message


# Keys and values


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("rank=4", "rank: unknown key; did you mean adapter.rank?"),
        ("modle=x", "modle: unknown key; did you mean model?"),
        ("packing.tokenz=4", "packing.tokenz: unknown key; did you mean packing.tokens?"),
        ("train.max_length=4", "train.max_length: unknown key; did you mean data.max_length?"),
        ("warmpu=4", "warmpu: unknown key; did you mean train.warmup?"),
        ("memory.qqqqq=4", "memory.qqqqq: unknown key; the keys here are activations, buffers, host_limit"),
        ("adapter.rank=x", "adapter.rank: x does not fit; give a whole number > 0"),
        ("adapter.rank='8'", "adapter.rank: '8' does not fit; give a whole number > 0"),
        ("adapter.rank=true", "adapter.rank: true does not fit"),
        ("adapter.rank=", "adapter.rank: null does not fit"),
        ("packing.tokens=3.7", "packing.tokens: 3.7 does not fit; give a whole number > 1"),
        ("packing.enabled=maybe", "packing.enabled: maybe does not fit; give true or false"),
        ("packing.enabled=1", "packing.enabled: 1 does not fit; give true or false"),
        ("train.clip=.nan", "train.clip: .nan does not fit; give a number >= 0"),
        ("train.learning_rate=.inf", "train.learning_rate: .inf does not fit"),
        ("train.learning_rate=true", "train.learning_rate: true does not fit"),
        ("adapter.dropout=1", "adapter.dropout: 1 does not fit; give a number >= 0 and < 1"),
        ("train.schedule=cosin", "train.schedule: cosin does not fit; give one of cosine, linear, constant"),
        ("train.steps=0", "train.steps: 0 does not fit; give a whole number > 0 and <= 2,147,483,647, or null"),
        ("train.trackers=[mlflow]", "train.trackers: [mlflow] does not fit; give a list, each item one of"),
        ("adapter.targets=[1]", "adapter.targets: [1] does not fit; give text, or a list, each item text"),
        ("data.fields=[a]", "data.fields: [a] does not fit; give a mapping of text to text"),
        ("data.fields.prompt=3", "data.fields: {prompt: 3} does not fit"),
        ("load.revision=123", "load.revision: 123 is read as a number; put quotes around it"),
        ("output=yes", "output: true is read as a switch; put quotes around it"),
        ("output=", "output: missing; give the folder"),
        ("data.train='  '", "data.train: missing; give a local file"),
        ("memory=3", "memory: 3 is not a section; indent its keys below it (activations, buffers, host_limit, tiles)"),
        ("data=[a]", "data: [a] is not a section"),
        ("packing", "--set packing: not of the form key=value"),
        ("=3", "--set =3: not of the form key=value"),
        ("a..b=3", "--set a..b=3: not of the form key=value"),
        ("model.name=x", "--set model.name=x: model is some/model, which has no keys"),
        ("data.chat_template={{ x }}", "the value is not YAML (line 1, column 2: "),
    ],
)
def test_refused_keys_and_values(write: Write, override: str, told: str) -> None:
    message = problem(write(MINIMAL), override)
    assert told in message
    assert "problems" not in message  # nothing else was found wrong


def test_offloading_is_asked_for_in_the_recipe(write: Write) -> None:
    overrides = ["memory.activations=offload", "memory.buffers=3", "memory.host_limit=32"]
    memory = load_recipe(write(MINIMAL), overrides).memory
    assert (memory.activations, memory.buffers, memory.host_limit) == ("offload", 3, 32.0)
    plain = load_recipe(write(MINIMAL)).memory
    assert (plain.activations, plain.buffers, plain.host_limit) == ("auto", "auto", None)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["memory.buffers=0"], "memory.buffers: 0 does not fit; give"),
        (["memory.buffers=two"], "memory.buffers: two does not fit; give"),
        (["memory.host_limit=0"], "memory.host_limit: 0 does not fit; give"),
        (["memory.host_limit=half"], "memory.host_limit: half does not fit; give"),
        (
            ["memory.activations=keep", "memory.buffers=2"],
            "memory.buffers: 2 has no effect with memory.activations: keep",
        ),
        (
            ["memory.activations=recompute", "memory.host_limit=8"],
            "memory.host_limit: 8.0 has no effect with memory.activations: recompute; remove one of them",
        ),
    ],
)
def test_what_offloading_can_not_be_given(write: Write, overrides: list[str], told: str) -> None:
    assert told in problem(write(MINIMAL), *overrides)


def test_all_problems_are_told_at_once(write: Write) -> None:
    message = problem(write("rank: 3\npacking: {tokens: 3.7}\ntrain: {mode: fast}\nmodel: m\n"), "foo")
    lines = message.splitlines()
    assert lines[0].endswith("recipe.yaml: 6 problems")
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "--set foo",
        "rank",
        "data.train",
        "packing.tokens",
        "train.mode",
        "output",
    ]


# Options that exclude each other


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["packing.tokens=65536", "packing.rows=32768"], "packing.rows 32768 > 2,147,483,647: boundaries are 32-bit"),
        (["packing.tokens=1e99"], "boundaries are 32-bit numbers; lower either"),
        (["data.max_length=65", "packing.tokens=64"], "data.max_length: 65 > packing.tokens 64"),
        (
            ["train.sharding=fsdp2", "train.optimizer=adamw8bit"],
            "train.sharding: fsdp2 can't divide what train.optimizer: adamw8bit packs; set train.sharding: none, or "
            "train.optimizer: adamw",
        ),
        (["packing.enabled=false", "packing.window=9"], "packing.window: 9 has no effect with packing.enabled: false"),
        (["adapter.kind=none", "adapter.rank=8"], "adapter.rank: 8 has no effect with adapter.kind: none"),
        (["adapter.kind=none", "adapter.targets=[q_proj]"], "adapter.targets: [q_proj] has no effect"),
        (["adapter.kind=none", "load.quantize=nf4"], "load.quantize: nf4 holds frozen weights, and adapter.kind: none"),
        (
            ["adapter.kind=none", "load.dtype=bfloat16", "train.optimizer=adamw8bit"],
            "load.dtype: bfloat16 is trained whole and small updates would round away: adamw8bit keeps no float32",
        ),
        (
            ["adapter.modules_to_save=[lm_head]", "train.optimizer=adamw8bit"],
            "adapter.modules_to_save: [lm_head] may be held in half precision, where small updates would round away",
        ),
        (["train.steps=10", "train.warmup=10"], "train.warmup: 10 steps >= train.steps 10"),
        (["train.warmup=2.5"], "train.warmup: 2.5 is neither a share"),
        (["train.eval_every=5"], "train.eval_every: 5 needs held-out rows; give data.eval"),
    ],
)
def test_conflicts(write: Write, overrides: list[str], told: str) -> None:
    assert told in problem(write(MINIMAL), *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.max_length=64", "packing.tokens=64"],
        ["adapter.kind=none", "adapter.rank=16"],
        ["load.quantize=nf4", "load.dtype=bfloat16", "train.optimizer=adamw8bit"],
        ["adapter.kind=none", "train.optimizer=adamw8bit"],
        ["adapter.modules_to_save=[lm_head]", "train.optimizer=adamw8bit", "load.dtype=float32"],
        ["adapter.kind=none", "load.dtype=bfloat16"],
        ["train.steps=10", "train.warmup=9"],
        ["train.steps=1"],
        ["train.eval_every=5", "data.eval=x"],
    ],
)
def test_neighbours_of_the_conflicts_are_accepted(write: Write, overrides: list[str]) -> None:
    load_recipe(write(MINIMAL), overrides)


def test_conflicts_are_found_without_a_file_too() -> None:
    parts: dict[str, Any] = {"model": "m", "data": DataOptions(train="t"), "output": "o"}
    with pytest.raises(InputError, match=r"train\.eval_every.*"):
        Recipe(**parts, train=TrainOptions(eval_every=3))
