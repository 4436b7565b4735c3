"""Compiled layers: checkpointing stays outside of what is compiled, so that it may move inputs about."""

from typing import Any

import pytest
import torch
import torch._dynamo

from mixtures import mixture_of
from offloading import LAYERS, assert_same_bits, deep, offloaded, plain, step
from slipstream.device.segments import Segments
from slipstream.model.routing import Routing
from slipstream.step.regional import CompiledLayers
from slipstream.transform import Options, apply


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


def test_looped_experts_are_compiled_for_no_counts(untranslated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's slices have other sizes in each batch, which must not become constants of compiled code."""
    seen, counts = set(), Routing.counts.func  # a cached property's

    def heard(routing: Routing) -> list[int]:
        found = counts(routing)
        seen.add(tuple(found))
        return found

    monkeypatch.setattr(Routing, "counts", property(heard))
    model = apply(mixture_of("olmoe"), Options(experts="loop"))
    layers = CompiledLayers(model.get_decoder())
    compiled = []
    with layers.active():
        for seed in range(4):
            ids = torch.randint(3, 60, (1, 24), generator=torch.Generator().manual_seed(seed))
            model(input_ids=ids, segments=Segments.from_lengths([10, 14])).logits.sum().backward()
            compiled.append(torch._dynamo.utils.counters["frames"]["ok"])
    assert len(seen) >= 4
    assert compiled[0] > 0
    assert compiled[1] == compiled[-1]
