"""The support page is what its generator writes, and says what the choosers say."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def generator() -> Any:
    spec = importlib.util.spec_from_file_location("support_page", ROOT / "docs" / "support.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_regenerating_changes_nothing(generator: Any) -> None:
    assert generator.main(["--check"]) == 0, "run python docs/support.py"


def test_another_choice_is_noticed(generator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "compute_dtype", lambda device: "float32")
    assert generator.main(["--check"]) == 1


def test_every_class_is_there_with_reasons(generator: Any) -> None:
    text = generator.PAGE.read_text(encoding="utf-8")
    for title in generator.CLASSES:
        assert f"## {title}\n" in text
    assert {name for name in generator.devices() if f"| `{name}` |" not in text} == set()
    for told in (
        "shares one memory with the host",
        "wait in host memory",
        "needs compute capability 8.0 or newer",
        "CUDA graphs need a CUDA device",
    ):
        assert told in text
