"""A recomputed layer takes the experts that its forward took, ties or not, and gradients stay the model's."""

from typing import Any

import pytest
import torch

from mixtures import MIXTURES, Made, mixture_of
from packed import documents, gradients, logits_of, row_of
from slipstream import Options, apply, restore
from slipstream.model import experts
from slipstream.model.experts_choice import AppliedExperts
from slipstream.model.experts_kept import RUNNING
from slipstream.model.routing import route
from slipstream.transform import ATTRIBUTE

TOPKS = {"deepseek_v2": 2, "deepseek_v3": 3}
"""Calls of topk in one mixture block, where they are not one: groups are chosen first."""


def step(model: Any, seed: int = 0) -> torch.Tensor:
    return logits_of(model, row_of(documents(seed=seed))).square().mean()


def mixture_on(model: Any) -> AppliedExperts:
    found = getattr(model, ATTRIBUTE).experts
    assert isinstance(found, AppliedExperts)
    return found


@pytest.mark.parametrize("choice", ["grouped", "loop"])
@pytest.mark.parametrize("family", MIXTURES)
def test_no_second_topk_and_the_same_bits(family: str, choice: Any) -> None:
    kept = apply(mixture_of(family), Options(experts=choice, activations="keep"))
    step(kept).backward()
    model = apply(mixture_of(family), Options(experts=choice, activations="recompute"))
    with Made() as forward:
        loss = step(model)
    with Made() as backward:
        loss.backward()
    blocks = len(mixture_on(model).kept.blocks)
    assert blocks == (1 if family in TOPKS else 2)
    assert forward.names.count("aten.topk") == 2 * blocks * TOPKS.get(family, 1)  # values and indices
    assert "aten.topk" not in backward.names
    assert forward.names.count("aten.sort") == 2 * blocks
    assert "aten.sort" not in backward.names
    assert "aten.silu" in backward.names or "aten.clamp" in backward.names  # it did recompute
    ours, theirs = gradients(model), gradients(kept)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert RUNNING.get() is None


def tie(model: Any) -> list[torch.Tensor]:
    """Make the first two experts of every router a tie but for a bias; gives the biases."""
    biases = []
    for block in mixture_on(model).kept.blocks:
        router = block.router if hasattr(block, "router") else block.gate
        bias = router.bias if hasattr(router, "bias") else router.e_score_correction_bias
        with torch.no_grad():
            router.weight[1] = router.weight[0]
            bias[:2] = 0
        biases.append(bias.data)
    return biases


def near_ties(family: str, activations: str, keep: bool = True) -> dict[str, torch.Tensor]:
    """Gradients where the forward prefers the first of two tied experts and the backward the second."""
    model = apply(mixture_of(family), Options(activations=activations))
    biases = tie(model)
    if not keep:
        mixture_on(model).kept.detach()
    for bias in biases:
        bias[0] = 1e-6
    loss = step(model)
    for bias in biases:
        bias[0] = -1e-6
    loss.backward()
    return gradients(model)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_near_ties_are_decided_once(family: str) -> None:
    """transformers#47467, Automodel#2635."""
    expected = near_ties(family, "keep")
    whole = torch.stack([g.norm() for g in expected.values()]).norm()

    def distance(found: dict[str, torch.Tensor]) -> float:
        return float(torch.stack([(found[name] - g).norm() for name, g in expected.items()]).norm() / whole)

    assert distance(near_ties(family, "recompute")) < 1e-4
    try:
        without = distance(near_ties(family, "recompute", keep=False))
    except torch.utils.checkpoint.CheckpointError:  # other experts have other numbers of tokens
        without = 1.0
    assert without > 1e-2  # the interesting case: the recompute would have decided otherwise


def test_a_graph_kept_for_a_second_backward() -> None:
    model = apply(mixture_of("gpt_oss"), Options(activations="recompute"))
    loss = step(model)
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    assert all(torch.equal(twice, 2 * once[name]) for name, twice in gradients(model).items())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_then_two_backwards(order: tuple[int, int]) -> None:
    def run(activations: Any) -> dict[str, torch.Tensor]:
        model = apply(mixture_of("mixtral"), Options(activations=activations))
        losses = [step(model, seed=0), step(model, seed=1)]
        for index in order:
            losses[index].backward()
        return gradients(model)

    kept, recomputed = run("keep"), run("recompute")
    assert all(torch.equal(recomputed[name], kept[name]) for name in kept)


def test_an_error_in_a_layer_ends_its_pass() -> None:
    model = apply(mixture_of("gpt_oss"), Options(activations="recompute"))
    block = mixture_on(model).kept.blocks[1]
    hook = block.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model)
    assert RUNNING.get() is None
    hook.remove()
    step(model).backward()


def test_blocks_get_their_own_forward_back() -> None:
    model = mixture_of("gpt_oss")
    block = model.model.layers[0].mlp
    own = block.forward
    block.forward = lambda *args: own(*args)
    mine = block.forward
    apply(model)
    assert block.forward is not mine
    restore(model)
    assert block.forward is mine
    assert "forward" not in vars(model.model.layers[1].mlp)


def test_the_loop_asks_for_its_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for each layer's counts in the forward, and not again in the recompute."""
    asked: list[torch.Tensor] = []
    real = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> Any:
        asked.append(tensor)
        return real(tensor)

    model = apply(mixture_of("gpt_oss"), Options(experts="loop", activations="recompute"))
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    loss = step(model)
    offsets = [tensor for tensor in asked if tensor.dtype == torch.int32]
    assert len(offsets) >= len(mixture_on(model).kept.blocks)
    asked.clear()
    loss.backward()
    assert asked == []


def test_a_recompute_of_what_was_compiled_sorts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code keeps no routing; an uncompiled recompute of it (a compiler's limit was reached) makes its own."""
    expected = apply(mixture_of("gpt_oss"), Options(experts="grouped", activations="recompute"))
    step(expected).backward()
    model = apply(mixture_of("gpt_oss"), Options(experts="grouped", activations="recompute"))
    real = experts.kept_route
    monkeypatch.setattr(experts, "kept_route", lambda module, index, count: route(index, count))
    loss = step(model)
    monkeypatch.setattr(experts, "kept_route", real)
    with Made() as backward:
        loss.backward()
    assert "aten.sort" in backward.names
    ours, theirs = gradients(model), gradients(expected)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
