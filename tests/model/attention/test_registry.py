"""From a model's attention call to a kernel's: what is handed on, what is refused, what stays as it was."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from packed import documents, logits_of, model_of, row_of
from slipstream import InputError, Segments, apply, restore
from slipstream.model.attention import Needs, attention_key, mask_placeholder, register_attention
from slipstream.model.attention.call import Call
from slipstream.model.attention.choice import KERNELS
from slipstream.model.attention.registry import _over_segments

PLAIN = Needs(head_width=16, value_width=16)
NEEDS = {
    "plain": PLAIN,
    "capped": Needs(head_width=16, value_width=16, softcap=True),
    "sinks": Needs(head_width=16, value_width=16, sinks=True),
}
SEGMENTS = Segments.from_lengths([5, 1, 6], total=14)


def tensors(heads: int = 2, groups: int = 1, tokens: int = 14) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, n, tokens, 16) for n in (heads, groups, groups)]


class Kernel:
    """Writes down what it is given."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def __call__(self, q: Any, k: Any, v: Any, segments: Segments, call: Call) -> torch.Tensor:
        self.seen = {"q": q, "k": k, "v": v, "segments": segments, "call": call}
        return q


def unpacked(module: nn.Module, *given: Any, **named: Any) -> Any:
    return "unpacked", (given, named)


@pytest.mark.parametrize("needs", NEEDS)
def test_registering_adds_our_keys_and_leaves_others_alone(needs: str) -> None:
    attention, masks = AttentionInterface(), AttentionMaskInterface()
    before = {key: attention[key] for key in attention.valid_keys() if not key.startswith("slipstream")}
    assert "sdpa" in before
    register_attention()
    register_attention()
    assert {key: attention[key] for key in before} == before
    for choice in KERNELS:
        key = attention_key(choice, NEEDS[needs])
        assert key in attention.valid_keys()
        assert key.startswith("slipstream_")
        assert masks[key] is masks["sdpa" if needs == "plain" else "eager"]
        assert needs == "plain" or "sdpa" not in key  # transformers would take it for its own and refuse the model
    keys = {attention_key(choice, need) for choice in KERNELS for need in NEEDS.values()}
    assert len(keys) == 2 * len(KERNELS)


def test_what_a_kernel_is_handed() -> None:
    kernel, (q, k, v), sinks = Kernel(), tensors(), torch.zeros(2)
    module = nn.Module()
    segments = Segments.from_lengths([5, 1, 6], total=14)
    out, weights = _over_segments(kernel, unpacked)(
        module,
        q,
        k,
        v,
        mask_placeholder(q.device),
        scaling=0.3,
        dropout=0.1,
        sliding_window=4,
        softcap=30.0,
        s_aux=sinks,
        segments=segments,
        position_ids=None,
    )
    assert out is q
    assert weights is None
    assert kernel.seen["k"] is k
    assert kernel.seen["v"] is v
    assert kernel.seen["segments"] is segments
    assert kernel.seen["call"] == Call(scale=0.3, dropout=0.1, window=4, softcap=30.0, sinks=sinks)
    assert segments.readers == {id(module)}


@pytest.mark.parametrize(("window", "handed"), [(None, None), (5, 5), (6, None), (7, None)])
def test_a_window_no_segment_outgrows_is_none(window: int | None, handed: int | None) -> None:
    kernel = Kernel()
    _over_segments(kernel, unpacked)(nn.Module(), *tensors(), None, sliding_window=window, segments=SEGMENTS)
    assert kernel.seen["call"].window == handed


def test_under_autocast_a_kernel_gets_its_dtype() -> None:
    kernel, (q, k, v) = Kernel(), tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _over_segments(kernel, unpacked)(nn.Module(), q, k.bfloat16(), v, None, segments=SEGMENTS)
    assert {kernel.seen[name].dtype for name in "qkv"} == {torch.bfloat16}


def test_without_segments_every_argument_goes_on() -> None:
    kernel, (q, k, v), mask = Kernel(), tensors(), torch.ones(1)
    settings = {"scaling": 0.3, "dropout": 0.1, "sliding_window": 4, "softcap": 30.0, "s_aux": None, "is_causal": True}
    out, (given, named) = _over_segments(kernel, unpacked)(nn.Module(), q, k, v, mask, **settings)
    assert out == "unpacked"
    assert not kernel.seen
    assert all(a is b for a, b in zip(given, (q, k, v, mask), strict=True))
    assert named == settings


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        ({}, {"position_bias": torch.zeros(1)}, "Module asks for position_bias, which packed attention does not"),
        ({"is_causal": False}, {}, "attends in both directions"),
        ({}, {"is_causal": False}, "attends in both directions"),
        ({}, {"attention_mask": torch.zeros(1, 1, 14, 14)}, r"makes a mask of its own, \[1, 1, 14, 14\]"),
        (
            {},
            {"segments": Segments.from_lengths([5, 1])},
            r"segments hold 6 tokens .* queries of shape \[1, 2, 14, 16\]",
        ),
        ({}, {"key": torch.zeros(1, 1, 20, 16)}, r"keys of shape \[1, 1, 20, 16\].*without a cache"),
        ({}, {"query": torch.zeros(2, 2, 14, 16)}, r"queries of shape \[2, 2, 14, 16\]"),
        ({"config": SimpleNamespace(sliding_window=5)}, {}, "limits its view by sliding_window 5 without telling"),
        (
            {"config": SimpleNamespace(layer_types=["chunked_attention"], attention_chunk_size=4), "layer_idx": 0},
            {},
            r"by attention_chunk_size 4 .*, and a segment has 6 tokens; lower max_length to 4",
        ),
    ],
)
def test_what_would_not_be_honoured_is_refused(module: Any, changes: Any, message: str) -> None:
    kernel, (q, k, v) = Kernel(), tensors()
    asking = nn.Module()
    vars(asking).update(module)
    given = {"query": q, "key": k, "value": v, "attention_mask": None, "segments": SEGMENTS, **changes}
    with pytest.raises(InputError, match=message):
        _over_segments(kernel, unpacked)(asking, **given)
    assert not kernel.seen


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(sliding_window=6),
        SimpleNamespace(sliding_window=None),
        SimpleNamespace(layer_types=["full_attention"], sliding_window=4),
        None,
    ],
)
def test_a_window_that_matters_to_no_segment_is_not_refused(config: Any) -> None:
    kernel, module = Kernel(), nn.Module()
    vars(module).update(config=config, layer_idx=0)
    _over_segments(kernel, unpacked)(module, *tensors(), None, segments=SEGMENTS)
    assert kernel.seen


def test_the_placeholder_changes_no_scores() -> None:
    mask = mask_placeholder(torch.device("cpu"))
    q = torch.randn(1, 2, 5, 8)
    masked = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert torch.allclose(masked, torch.nn.functional.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_left_padded_generation_is_the_models_own(family: str) -> None:
    """Soft caps and sinks go on to the eager function of the model's file, bit for bit, also after a packed forward."""
    prompts = torch.tensor([[0, 0, 0, 0, 0, 0, 5, 6], [9, 10, 11, 12, 13, 14, 15, 16], [0, 0, 3, 4, 5, 6, 7, 8]])
    mask = (prompts > 0).long()
    assert prompts.shape[1] > 4  # longer than the window

    def answer(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        given = model.generate(
            input_ids=prompts, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **settings
        )
        return given.sequences, torch.stack(given.logits)

    model = model_of(family, initializer_range=0.2).eval()
    sequences, logits = answer(model)
    alone = model.generate(input_ids=prompts[2:, 2:], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(alone[0], sequences[2, 2:])  # the padding is masked
    apply(model)
    with torch.no_grad():
        logits_of(model, row_of(documents()))
    again, logits_again = answer(model)
    assert torch.equal(again, sequences)
    assert torch.equal(logits_again, logits)
    assert torch.equal(answer(restore(model))[1], logits)
