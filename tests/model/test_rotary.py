"""Rotary positions that scale with length: each document is rotated as it would be alone, whatever is beside it."""

from typing import Any

import pytest
import torch

from packed import documents, logits_alone, logits_of, model_of, row_of, scaled
from slipstream import Options, apply, decisions, restore
from slipstream.train.loss import summed_cross_entropy

LIMIT = 8
LENGTHS = (3, 20, 8, 9, 1, 5)
"""On both sides of the limit, and on it."""
RELATIVE = 1e-5
SCALED = [("phi3", "longrope"), ("llama", "longrope"), ("llama", "dynamic"), ("qwen3", "dynamic")]
CASES = pytest.mark.parametrize(("family", "kind"), SCALED)


def tiny(family: str, kind: str) -> Any:
    """Weights wide enough for positions to matter; without phi3's window, so that whole documents are seen."""
    wide = {"initializer_range": 0.3, "sliding_window": None}
    return model_of(family, **wide, **scaled(kind, LIMIT)).eval()


def alone(family: str, kind: str, examples: list[dict[str, list[int]]]) -> torch.Tensor:
    """Each document through a model of its own: dynamic scaling remembers what was seen before."""
    with torch.no_grad():
        return torch.cat([logits_alone(tiny(family, kind), [example]) for example in examples])


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@CASES
def test_documents_on_both_sides_of_the_limit_equal_themselves_alone(family: str, kind: str) -> None:
    examples = documents(LENGTHS)
    expected = alone(family, kind, examples)
    model = apply(tiny(family, kind))
    with torch.no_grad():
        found = logits_of(model, row_of(examples))[0, : sum(LENGTHS)]
    assert error(found, expected) <= RELATIVE
    assert "rotary" in {decision.name for decision in decisions(model) if decision.on}


@CASES
def test_positions_of_the_row_would_differ(family: str, kind: str) -> None:
    """Without our rotary forward the same packed row is rotated by its longest document: the test above can fail."""
    examples = documents(LENGTHS)
    expected = alone(family, kind, examples)
    model = apply(tiny(family, kind))
    vars(model.model.rotary_emb).pop("forward")
    with torch.no_grad():
        found = logits_of(model, row_of(examples))[0, : sum(LENGTHS)]
    assert error(found, expected) > 100 * RELATIVE
    short = slice(0, LENGTHS[0])
    assert error(found[short], expected[short]) > 100 * RELATIVE


@CASES
def test_stock_transformers_with_position_ids_differs(family: str, kind: str) -> None:
    """Its own handling of a packed row sees the boundaries, but one length for all."""
    examples = documents(LENGTHS)
    row = row_of(examples, sum(LENGTHS))
    expected = alone(family, kind, examples)
    with torch.no_grad():
        stock = tiny(family, kind)(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False)
    assert error(stock.logits[0], expected) > 100 * RELATIVE


@CASES
def test_batches_in_a_row_with_changing_lengths(family: str, kind: str) -> None:
    """Nothing of one batch stays for the next, and unpacked calls between them are the model's own."""
    model = apply(tiny(family, kind))
    rows = [(20, 3), (5, 5, 5), (30,), (8, 9, 2), (1, 1, 16)]
    probe = torch.arange(5, 9)[None]
    for seed, lengths in enumerate(rows):
        examples = documents(lengths, seed)
        with torch.no_grad():
            found = logits_of(model, row_of(examples))[0, : sum(lengths)]
            assert error(found, alone(family, kind, examples)) <= RELATIVE
            assert torch.equal(model(input_ids=probe).logits, tiny(family, kind)(input_ids=probe).logits)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@CASES
def test_gradients_equal_those_of_documents_alone(family: str, kind: str, activations: Any) -> None:
    examples = documents(LENGTHS)
    model, row = apply(tiny(family, kind), Options(activations=activations)).train(), row_of(examples)
    summed_cross_entropy(logits_of(model, row), row["labels"]).backward()
    reference = tiny(family, kind)
    whole = torch.zeros(sum(p.numel() for p in reference.parameters()))
    for example in examples:
        single = tiny(family, kind)
        one = row_of([example], len(example["input_ids"]))
        if (one["labels"] != -100).any():
            summed_cross_entropy(single(input_ids=one["input_ids"]).logits, one["labels"]).backward()
            whole += torch.cat([p.grad.flatten() for p in single.parameters()])
    ours = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert whole.any()
    assert error(ours, whole) <= RELATIVE


@CASES
def test_restore_puts_the_models_own_forward_and_frequencies_back(family: str, kind: str) -> None:
    model = tiny(family, kind)
    rotary = model.model.rotary_emb
    own, names = rotary.forward.__func__, sorted(vars(rotary))
    buffers = {name: value.clone() for name, value in rotary.named_buffers()}
    apply(model)
    assert "forward" in vars(rotary)
    with torch.no_grad():
        logits_of(model, row_of(documents(LENGTHS)))
    restore(model)
    assert rotary.forward.__func__ is own
    assert sorted(vars(rotary)) == names
    assert all(torch.equal(value, buffers[name]) for name, value in rotary.named_buffers())
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, tiny(family, kind)(input_ids=ids).logits)


def test_positions_that_no_length_scales_are_left_alone() -> None:
    for overrides in ({}, scaled("yarn", LIMIT)):
        model = apply(model_of("llama", **overrides).eval())
        assert "forward" not in vars(model.model.rotary_emb)
        assert "rotary" not in {decision.name for decision in decisions(model)}
        examples = documents(LENGTHS)
        with torch.no_grad():
            found = logits_of(model, row_of(examples))[0, : sum(LENGTHS)]
            assert error(found, logits_alone(restore(model), examples)) <= RELATIVE
