"""The support page is what its generator writes, and says what the choosers say."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from slipstream import doctor
from slipstream.memory.policy import ActivationsChoice
from slipstream.model.attention import AttentionChoice
from slipstream.model.experts_choice import ExpertsChoice
from slipstream.step.choice import ModeChoice

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def generator() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("support_page", ROOT / "docs" / "support.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.everything_installed():
        yield module


def test_regenerating_changes_nothing(generator: Any) -> None:
    assert generator.main(["--check"]) == 0, "run python docs/support.py"


def test_another_choice_is_noticed(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "compute_dtype", lambda device: "float32")
    assert generator.main(["--check"]) == 1


def named(choice: Any) -> set[str]:
    return set(get_args(choice)) - {"auto"}


def test_no_choice_is_left_out(generator: Any) -> None:
    assert set(generator.ATTENTION) == named(AttentionChoice)
    assert set(generator.ACTIVATIONS) == named(ActivationsChoice)
    assert set(generator.EXPERTS) == named(ExpertsChoice)
    assert set(generator.STEP) == named(ModeChoice)
    for dimension in ("attention", "activations", "experts", "step"):
        assert set(generator.SIGNS[dimension]) == set(getattr(generator, dimension.upper()))


def rows_of(text: str) -> dict[tuple[str, str], list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {(row[0], row[1]): row[2:] for row in cells}


def test_done_replaced_and_refused(generator: Any) -> None:
    rows, columns = rows_of(generator.matrix()), list(generator.CLASSES)
    cpu, spark, old = columns.index("CPU"), columns.index("DGX Spark"), columns.index("RTX laptops without bf16")
    assert rows["attention, dense", "varlen"][cpu] == rows["attention, dense", "varlen"][old] == "refused"
    assert rows["attention, dense", "varlen"][spark] == "on"
    assert rows["activations", "offload"][cpu] == "→ recompute"
    assert rows["step, dense, LoRA", "captured"][cpu] == "refused"
    assert rows["adapter", "LoRA, NF4 base"][cpu] == "refused"
    assert {cell for key, row in rows.items() if key[0] != "---" for cell in row} >= {"on", "refused", "→ recompute"}


LINES = {
    **{f"attention {name}": ("attention, dense", name) for name in get_args(AttentionChoice)[1:]},
    **{f"activations {name}": ("activations", name) for name in get_args(ActivationsChoice)[1:]},
    **{f"experts {name}": ("experts", name) for name in get_args(ExpertsChoice)[1:]},
    **{f"step {name}": ("step, dense, LoRA", name) for name in get_args(ModeChoice)[1:]},
    "NF4 weights": ("adapter", "LoRA, NF4 base"),
}
"""What the doctor calls the page's choices."""


def test_the_doctor_says_the_same_of_every_device(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.model.quantize.find_spec", lambda name: name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # Triton, as on the page
    rows, seen = rows_of(generator.matrix()), set()
    dimensions = {key[0] for key in rows} - {"---", "dimension"}
    assert dimensions - {key for key, _ in LINES.values()} == {"attention, mixture", "step, all weights"}
    for column, name in enumerate(generator.CLASSES.values()):
        device = generator.devices()[name]
        told = {one.name: one for one in doctor.capabilities([device] * (device.kind == "cuda"), device, "none here")}
        for line, (dimension, choice) in LINES.items():
            cell = rows[dimension, choice][column]
            assert told[line].available == (cell == "on"), (name, line, told[line])
            seen.add(cell)
        sinks = [rows["attention, mixture", kernel][column] == "on" for kernel in generator.ATTENTION]
        lines = [told[f"attention {kernel}"] for kernel in generator.ATTENTION]
        assert sinks == [line.available and "not with attention sinks" not in line.reason for line in lines]
        whole = rows["step, all weights", "captured"][column] == "on"
        assert whole == (told["step captured"].available and "not of all weights" not in told["step captured"].reason)
        support = generator.support(device)
        for kind, taken in (
            ("attention", support.attention[0]),
            ("experts", support.experts[0]),
            ("step", support.step[0]),
        ):
            assert "what auto takes" in told[f"{kind} {taken}"].reason
    assert seen == {"on", "refused", "→ recompute"}


def test_steps_by_class(generator: Any) -> None:
    text = dict(zip(generator.CLASSES, generator.steps(), strict=True))
    hopper = text["Data-centre cards with a grouped product (Hopper, B200)"]
    assert "| varlen | captured | captured | compiled | captured | compiled |" in hopper
    assert "| xformers | compiled | compiled | compiled | – | – |" in hopper  # no sinks
    assert "| sdpa | eager | – | eager | eager | eager |" in text["CPU"]


def test_every_choice_is_tested_somewhere_and_cards_have_their_own(generator: Any) -> None:
    rows = rows_of(generator.tested())
    assert "model/attention/xformers" in rows["attention", "xformers"][0]
    assert "no_sync" in rows["activations", "offload"][1]
    assert all(row[0] != "none" for key, row in rows.items() if key[0] not in ("---", "dimension"))


def test_every_class_is_there_with_reasons(generator: Any) -> None:
    text = generator.PAGE.read_text(encoding="utf-8")
    for title in generator.CLASSES:
        assert f"## {title}\n" in text
    assert {name for name in generator.devices() if f"| `{name}` |" not in text} == set()
    for told in (
        "shares one memory with the host",
        "wait in host memory",
        "needs compute capability 8.0 or newer",
        "CUDA graphs need a CUDA device, and this is a CPU",
    ):
        assert told in text
