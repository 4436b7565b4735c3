"""Compiled layers: checkpointing stays outside of what is compiled, so that it may move inputs about."""

from typing import Any

import pytest
import torch
import torch._dynamo

from offloading import LAYERS, assert_same_bits, deep, offloaded, plain, step
from slipstream.step.regional import CompiledLayers


@pytest.fixture
def untranslated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are traced as for compiling, and what was traced runs as it is: quick, and the same bits."""
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_it(function, backend="eager", **options))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("offload", [False, True])
def test_checkpointing_is_outside_of_compiled_layers(untranslated: None, offload: bool) -> None:
    expected = step(plain(deep()))

    def run(model: Any) -> None:
        layers = CompiledLayers(model.get_decoder())
        with layers.active():
            for _ in range(2):
                assert_same_bits(step(model), expected)

    model = deep()
    if offload:
        with offloaded(model) as made:
            run(model)
            assert made.lane.reloads == 2 * (LAYERS - 1)
    else:
        run(plain(model))
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["frames"]["ok"] == 2, "one layer's code for all layers, and the norm"
