"""``--help`` of every benchmark names the shapes and what is taken where nothing is asked for."""

import sys
from typing import Any

import pytest

from slipstream import cli
from slipstream.bench import known_shapes
from slipstream.bench.known_shapes import Default


@pytest.mark.parametrize(
    ("name", "shapes", "defaults"),
    [
        ("packing", known_shapes.ALL, (known_shapes.PACKING_SHAPES, known_shapes.PACKING_ROUNDS)),
        ("offload", known_shapes.ALL, (known_shapes.OFFLOAD_SHAPES, known_shapes.OFFLOAD_ROUNDS)),
        ("step", known_shapes.ALL, (known_shapes.STEP_SHAPES, known_shapes.STEP_TOKENS, known_shapes.STEP_ROUNDS)),
        ("experts", known_shapes.MIXTURES, (known_shapes.EXPERTS_SHAPES, known_shapes.EXPERTS_STEP_ROUNDS)),
        ("all", known_shapes.ALL, (known_shapes.TOGETHER_SHAPES, known_shapes.TOGETHER_ROUNDS)),
    ],
)
def test_help_of_a_benchmark_names_shapes_and_defaults(
    name: str, shapes: Any, defaults: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream", "bench", name, "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    out = capsys.readouterr().out
    text = "".join(out.split())
    assert len(shapes) > 2
    assert all(shape in text for shape in shapes)
    assert all("".join(str(default).split()) in text for default in defaults)
    asked = out.count("[default:") + out.count("--json") + out.count("--csv") + out.count("--out") + out.count("--nf4")
    options = [line for line in out.splitlines() if line.startswith("  --")]
    assert asked == len(options) - 1, "every option but --help has its default told"


def test_defaults_by_device() -> None:
    shapes, count = Default(("a", "b"), ("tiny",)), Default(20, 3)
    assert (shapes.on(True), shapes.on(False), count.on(True), count.on(False)) == (("a", "b"), ("tiny",), 20, 3)
    assert str(shapes) == "a,b on a card, else tiny"
