"""The summed loss: PyTorch's own, in chunks, for every number of tokens."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.cost.estimate import LOSS_CHUNK
from slipstream.train.loss import learned_tokens, summed_cross_entropy


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
