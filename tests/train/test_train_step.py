"""What a loop of one's own gets wrong is refused by ``TrainStep``, with the value and the remedy."""

from typing import Any

import pytest
import torch
from torch import nn

from packed import documents, model_of, row_of, with_adapter
from slipstream import InputError, TrainStep, apply, restore


def adapted() -> Any:
    return apply(with_adapter(model_of("llama"))).train()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def stepping(model: Any, **named: Any) -> TrainStep:
    return TrainStep(model, torch.optim.SGD(trained(model), lr=0.1), **named)


def plain(**changes: Any) -> dict[str, torch.Tensor]:
    """Documents of one length in rows of their own."""
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    return {"input_ids": ids, "labels": ids, **changes}


@pytest.mark.parametrize("mode", ["x", "", None])
def test_a_mode_that_there_is_not(mode: Any) -> None:
    model = adapted()
    with pytest.raises(InputError, match=r"train.mode: .* does not fit; give one of auto, eager, compiled, captured"):
        stepping(model, mode=mode)
    assert stepping(model, mode="eager").mode == "eager"


def test_an_optimizer_of_another_model() -> None:
    model = adapted()
    count = len(trained(model))
    assert count > 2
    with pytest.raises(InputError, match=rf"holds 0 of the model's {count} trained parameters; make it of all"):
        TrainStep(model, torch.optim.AdamW(trained(adapted())))
    with pytest.raises(InputError, match=rf"holds {count - 1} of the model's {count} trained parameters"):
        TrainStep(model, torch.optim.AdamW(trained(model)[1:]))
    groups = [{"params": trained(model)[:1], "lr": 1.0}, {"params": trained(model)[1:]}]
    other = nn.Parameter(torch.zeros(1))
    TrainStep(model, torch.optim.AdamW([*groups, {"params": [other]}]))  # groups, and more than the model's own


@pytest.mark.parametrize("optimizer", ["adamw", None, torch.optim.AdamW])
def test_no_optimizer(optimizer: Any) -> None:
    with pytest.raises(InputError, match=r"optimizer .*: a step needs one that is made, e.g. torch.optim.AdamW"):
        TrainStep(adapted(), optimizer)


def test_a_closed_step() -> None:
    step = stepping(adapted())
    step(plain())
    step.close()
    step.close()
    with pytest.raises(InputError, match="this step is closed"):
        step(plain())


@pytest.mark.parametrize("clip", [-1.0, float("nan")])
def test_a_clip_below_zero(clip: float) -> None:
    with pytest.raises(InputError, match=f"clip {clip}: the largest gradient norm is at least 0"):
        stepping(adapted(), clip=clip)


@pytest.mark.parametrize("seen_before", [True, False])
@pytest.mark.parametrize("restored", [True, False])
def test_packed_documents_without_apply(restored: bool, seen_before: bool) -> None:
    """Also those of a batch whose segments an applied model has read before."""
    batch = row_of(documents())
    if seen_before:
        stepping(adapted())(batch)
        assert batch["segments"].readers
    model = restore(adapted()) if restored else with_adapter(model_of("llama")).train()
    step = stepping(model)
    before = [parameter.clone() for parameter in trained(model)]
    with pytest.raises(InputError, match=r"did not read the segments.*give the trainer slipstream.apply"):
        step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, trained(model), strict=True))
    assert step(plain()).isfinite()  # unpacked, it trains as it is


def test_a_batch_without_labels() -> None:
    step = stepping(adapted())
    batch = {name: value for name, value in row_of(documents()).items() if name != "labels"}
    for given in (batch, [row_of(documents()), batch]):
        with pytest.raises(
            InputError, match=r"without labels \(it has input_ids, position_ids, segments\).*add labels"
        ):
            step(given)
    with pytest.raises(InputError, match=r"without labels \(it has nothing\)"):
        step({})


def test_a_model_in_evaluation_mode() -> None:
    model = adapted()
    step = stepping(model.eval())
    with pytest.raises(InputError, match=r"is in evaluation mode.*call model.train\(\)"):
        step(row_of(documents()))
    model.train()
    step(row_of(documents()))
    model.eval()  # for a look at held-out rows, and forgotten
    with pytest.raises(InputError, match="is in evaluation mode"):
        step(row_of(documents()))
