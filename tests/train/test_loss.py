"""The summed loss: PyTorch's own, in chunks, for every number of tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.cost.estimate import LOSS_CHUNK
from slipstream.model.head import Head
from slipstream.train.loss import (
    eager_loss_and_gradient,
    learned_tokens,
    loss_and_gradient,
    summed_cross_entropy,
)


def example(rows: int, tokens: int, vocabulary: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, vocabulary, (rows, tokens))
    labels[torch.rand(rows, tokens) < 0.4] = -100
    return torch.randn(rows, tokens, vocabulary, requires_grad=True), labels


def reference(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    shifted = logits[:, :-1].reshape(-1, logits.shape[-1]).double()
    return F.cross_entropy(shifted, labels[:, 1:].reshape(-1), reduction="sum")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tokens", [2, 7, LOSS_CHUNK - 1, LOSS_CHUNK, LOSS_CHUNK + 1, 2 * LOSS_CHUNK + 5])
def test_it_is_cross_entropy_of_the_next_token(rows: int, tokens: int) -> None:
    logits, labels = example(rows, tokens)
    labels[0, 1] = 3
    loss = summed_cross_entropy(logits, labels)
    expected = reference(logits, labels)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (found,) = torch.autograd.grad(loss, logits)
    (wanted,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(found, wanted.float(), atol=1e-6)
    assert int(learned_tokens(labels)) == int((labels[:, 1:] != -100).sum())


def test_rows_do_not_reach_into_each_other() -> None:
    logits, labels = example(2, 5)
    labels[:] = 4
    loss = summed_cross_entropy(logits, labels)
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad[:, -1].any()  # the last token of a row predicts nothing, nor the next row's first
    assert logits.grad[:, :-1].any(dim=-1).all()


def test_half_precision_is_summed_in_float32() -> None:
    logits, labels = example(1, 3000)
    half = logits.detach().bfloat16().requires_grad_()
    loss = summed_cross_entropy(half, labels)
    assert loss.item() == pytest.approx(reference(half.float(), labels).item(), rel=1e-5)
    loss.backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 5])
def test_nothing_learned_is_a_loss_of_zero_with_zero_gradients(tokens: int) -> None:
    logits, labels = example(1, tokens)
    labels[:, 1:] = -100
    loss = summed_cross_entropy(logits, labels)
    assert loss.item() == 0
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad.any()
    assert int(learned_tokens(labels)) == 0


def test_the_first_label_is_never_counted() -> None:
    assert int(learned_tokens(torch.tensor([[5, 6, -100, 7], [8, -100, -100, -100]]))) == 2


def frozen_head(scale: float = 1.0, softcap: float | None = None, dtype: torch.dtype = torch.float32) -> Head:
    torch.manual_seed(1)
    project = nn.Linear(16, 33, bias=False, dtype=dtype)
    project.weight.requires_grad_(False)
    return Head(project, scale, softcap)


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 3.0), (0.5, 2.0)])
@pytest.mark.parametrize("tokens", [2, LOSS_CHUNK + 1, 2 * LOSS_CHUNK])
def test_a_frozen_head_gives_the_gradient_in_the_forward(tokens: int, scale: float, softcap: float | None) -> None:
    head, labels = frozen_head(scale, softcap), example(1, tokens)[1]
    labels[0, 1] = 3
    hidden = (torch.randn(1, tokens, 16) * 3).requires_grad_()
    loss = summed_cross_entropy(hidden, labels, head)
    expected = reference(head(hidden), labels)
    assert type(loss.grad_fn).__name__ == "_FrozenHeadLossBackward"
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    (found,) = torch.autograd.grad(loss / 7, hidden)
    (wanted,) = torch.autograd.grad(expected / 7, hidden)
    assert wanted.abs().max() > 1e-3
    assert torch.allclose(found, wanted.float(), atol=1e-6)


def test_a_frozen_head_may_be_asked_twice() -> None:
    """``retain_graph``: the backward leaves what it keeps as it was."""
    head, labels, hidden = frozen_head(), example(1, 9)[1], torch.randn(1, 9, 16, requires_grad=True)
    loss = summed_cross_entropy(hidden, labels, head)
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(2 * loss, hidden)
    assert torch.equal(2 * first, second)


def test_a_head_that_is_trained_or_has_a_bias_is_recomputed() -> None:
    labels, hidden = example(1, 9)[1], torch.randn(1, 9, 16, requires_grad=True)
    trained = Head(nn.Linear(16, 33, bias=False))
    biased = Head(nn.Linear(16, 33).requires_grad_(False))
    for head in (trained, biased):
        assert head.frozen_weight() is None
        loss = summed_cross_entropy(hidden, labels, head)
        assert type(loss.grad_fn).__name__ != "_FrozenHeadLossBackward"
        assert loss.item() == pytest.approx(reference(head(hidden), labels).item(), rel=1e-6)
    loss.backward()
    summed_cross_entropy(hidden, labels, trained).backward()
    assert trained.project.weight.grad is not None


def test_a_frozen_head_computes_in_autocasts_dtype() -> None:
    head, labels, hidden = frozen_head(), example(1, 300)[1], torch.randn(1, 300, 16, requires_grad=True)
    exact = summed_cross_entropy(hidden, labels, head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = summed_cross_entropy(hidden, labels, head)
    assert rounded.dtype == torch.float32
    assert rounded.item() != exact.item()
    assert rounded.item() == pytest.approx(exact.item(), rel=1e-2)
    (found,) = torch.autograd.grad(rounded, hidden)
    (wanted,) = torch.autograd.grad(exact, hidden)
    assert found.dtype == torch.float32
    assert (found - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fewer_passes_give_the_same(dtype: torch.dtype, scale: float, softcap: float | None) -> None:
    """Rows that aren't learned give nothing, whatever lies in them."""
    torch.manual_seed(0)
    logits = (5 * torch.randn(40, 33)).to(dtype)
    targets = torch.randint(0, 33, (40,))
    targets[::3] = -100
    logits[3] = float("nan")
    for ours, plain in zip(
        eager_loss_and_gradient(logits.clone(), targets, scale, softcap),
        loss_and_gradient(logits.clone(), targets, scale, softcap),
        strict=True,
    ):
        assert ours.dtype == plain.dtype
        assert torch.allclose(ours, plain, rtol=1e-5 if ours.dtype == torch.float32 else 1e-2, atol=1e-6)
    assert ours.isfinite().all()
    assert not ours[::3].any()
    assert ours[1].any()
