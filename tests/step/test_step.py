"""Compiled and eager steps learn the same; a mode that fails is given up with the reason, and nothing is lost."""

import pytest
import torch
from torch import nn

from packed import documents, model_of, row_of, with_adapter
from slipstream import TrainStep, apply
from slipstream.errors import InputError
from slipstream.step.regional import CompiledLayers
from slipstream.transform import base_model

ROWS = [(9, 1, 17, 5, 1, 12), (20, 3, 8), (30,), (2, 2, 2)]


def stepping(mode: str, clip: float = 1.0) -> tuple[TrainStep, nn.Module]:
    model = apply(with_adapter(model_of("llama")).train())
    trained = [p for p in model.parameters() if p.requires_grad]
    return TrainStep(model, torch.optim.AdamW(trained, lr=1e-2), mode, clip=clip), model


def losses_of(step: TrainStep, count: int = 4) -> list[float]:
    return [float(step(row_of(documents(ROWS[i % len(ROWS)], seed=i)))) for i in range(count)]


def test_compiled_is_eager() -> None:
    compiled, model = stepping("compiled")
    assert compiled.mode == "compiled"
    before = {id(module): set(vars(module)) for module in model.modules()}
    torch._dynamo.utils.counters.clear()
    found = losses_of(compiled)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled.mode == "compiled"
    assert 4 <= graphs <= 12, "layers share their code, and boundaries are no constants of it"
    assert losses_of(compiled, 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "other boundaries compile nothing"
    assert {id(module): set(vars(module)) for module in model.modules()} == before, "compiled only inside a step"
    eager, _ = stepping("eager")
    assert found == pytest.approx(losses_of(eager), abs=2e-5)
    assert found[0] != found[1]


def test_a_step_is_one_large_batch() -> None:
    """Batches of a step count by their learned tokens."""
    together, one = stepping("eager")
    apart, other = stepping("eager")
    parts = documents((30, 12), seed=1)
    loss = together(row_of(parts))
    halves = apart([row_of(parts[:1]), row_of(parts[1:])])
    assert float(loss) == pytest.approx(float(halves), abs=1e-6)
    assert float(together.grad_norm) == pytest.approx(float(apart.grad_norm), rel=1e-4)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_it_is_a_plain_loop() -> None:
    """Under SGD: AdamW makes a whole update of a gradient that is nothing but rounding."""
    step, model = stepping("eager", clip=0.5)
    step.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    plain = apply(with_adapter(model_of("llama")).train())
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    for index in range(3):
        row = row_of(documents(ROWS[index], seed=index))
        loss = step(row)
        logits = plain(**{name: value for name, value in row.items() if name != "labels"}).logits[0, :-1]
        wanted = nn.functional.cross_entropy(logits, row["labels"][0, 1:])
        wanted.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
        assert norm > 0.5
        optimizer.step()
        optimizer.zero_grad()
        assert float(loss) == pytest.approx(float(wanted), abs=1e-5)
        assert float(step.grad_norm) == pytest.approx(float(norm), rel=1e-4)


def test_compiling_that_fails_goes_on_eager() -> None:
    step, _ = stepping("compiled")
    layers = step._step._layers
    assert layers is not None

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no code for this")

    for kind in layers._forwards:
        layers._forwards[kind] = broken
    found = losses_of(step)
    assert step.mode == "eager"
    assert "eager: compiling failed: RuntimeError: no code for this" in str(step.decisions[0])
    assert found == pytest.approx(losses_of(stepping("eager")[0]), abs=1e-6)


def test_a_model_without_apply_is_refused() -> None:
    model = with_adapter(model_of("llama")).train()
    step = TrainStep(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), "eager")
    with pytest.raises(InputError, match="did not read the segments"):
        step(row_of(documents()))


def test_nothing_to_train_and_nothing_to_run_are_told() -> None:
    model = apply(model_of("llama")).requires_grad_(False)
    with pytest.raises(InputError, match="no parameter of the model is trained"):
        TrainStep(model, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(InputError, match="no batches"):
        stepping("eager")[0]([])


def test_layers_with_a_forward_of_their_own_are_left_alone() -> None:
    decoder = base_model(model_of("llama")).get_decoder()
    every = len(CompiledLayers(decoder))
    own = decoder.layers[0].forward
    vars(decoder.layers[0])["forward"] = own
    assert len(CompiledLayers(decoder)) == every - 1
