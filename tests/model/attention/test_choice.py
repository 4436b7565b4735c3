"""The choice of attention for cards nobody has at hand: what is taken, and the reason told."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from nested import nested_model
from packed import FAMILIES, model_of
from slipstream import InputError
from slipstream.cost.hardware import Device
from slipstream.model.attention import Needs, choose_attention, xformers
from slipstream.model.attention.choice import KERNELS

LAPTOP = Device("cuda", "NVIDIA GeForce RTX 4060 Laptop GPU", 8 * 2**30, (8, 9), bf16=True, unified_memory=False)
TURING = Device("cuda", "Tesla T4", 16 * 2**30, (7, 5), bf16=False, unified_memory=False)
H200 = Device("cuda", "NVIDIA H200", 141 * 2**30, (9, 0), bf16=True, unified_memory=False)
SPARK = Device("cuda", "NVIDIA GB10", 128 * 2**30, (12, 1), bf16=True, unified_memory=True)
HOST = Device("cpu", "a host", 8 * 2**30, None, bf16=False, unified_memory=True)
PLAIN = Needs(head_width=64, value_width=64)
CAPPED, SINKS = replace(PLAIN, softcap=True), replace(PLAIN, sinks=True)
DROPOUT, MASK_ONLY = replace(PLAIN, dropout=0.1), replace(PLAIN, mask_only=True)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NEWER = (LAPTOP, H200, SPARK)


@pytest.fixture
def xformers_installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def say(installed: bool) -> None:
        monkeypatch.setattr(xformers, "find_spec", lambda name: object() if installed else None)
        monkeypatch.setattr(xformers, "_has_kernels", lambda: installed)

    say(False)
    return say


@pytest.mark.parametrize("device", NEWER, ids=lambda device: device.name)
@pytest.mark.parametrize(
    ("needs", "dtype", "expected", "reason"),
    [
        (PLAIN, BF16, "varlen", "varlen: variable-length kernel over cu_seqlens, no T x T mask"),
        (PLAIN, FP16, "varlen", "varlen: variable-length kernel"),
        (SINKS, BF16, "varlen", "varlen: variable-length kernel"),
        (CAPPED, BF16, "flex", r"flex: block mask.*\(varlen can't be used: it has no soft-capped logits\)"),
        (PLAIN, FP32, "flex", r"flex: .*varlen can't be used: its kernel computes in bfloat16 or float16, not .*32"),
        (DROPOUT, BF16, "sdpa", "sdpa: .*varlen can't be used: it has no dropout and the model's .* is 0.1"),
        (MASK_ONLY, BF16, "sdpa", "sdpa: .*varlen can't be used: this model hands its attention a mask, but no seg"),
        (replace(PLAIN, value_width=32), BF16, "flex", "flex: .*takes values as wide as keys, the model has 32 and 64"),
        (replace(PLAIN, head_width=36, value_width=36), BF16, "flex", "multiples of 8 up to 256, not 36"),
    ],
)
@pytest.mark.usefixtures("xformers_installed")
def test_newer_cards(device: Device, needs: Needs, dtype: torch.dtype, expected: str, reason: str) -> None:
    chosen, decision = choose_attention("auto", needs, device, dtype)
    assert chosen == expected
    assert decision.on
    assert re.search(reason, decision.reason)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("needs", [PLAIN, SINKS, CAPPED, DROPOUT, MASK_ONLY])
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_turing(xformers_installed: Any, installed: bool, needs: Needs, dtype: torch.dtype) -> None:
    """Neither bf16 nor FlashAttention: xFormers where it is installed and exact, else sdpa."""
    xformers_installed(installed)
    chosen, decision = choose_attention("auto", needs, TURING, dtype)
    assert chosen == ("xformers" if installed and needs is PLAIN and dtype is FP16 else "sdpa")
    if needs is not MASK_ONLY:
        assert "varlen can't be used: its kernel needs compute capability 8.0 or newer, Tesla T4 has 7.5" in (
            decision.reason
        )


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("needs", [PLAIN, SINKS, CAPPED, DROPOUT, MASK_ONLY])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_a_cpu_has_sdpa_alone(xformers_installed: Any, installed: bool, needs: Needs, dtype: torch.dtype) -> None:
    xformers_installed(installed)
    chosen, decision = choose_attention("auto", needs, HOST, dtype)
    assert chosen == "sdpa"
    assert decision.reason.startswith("sdpa: one mask a batch for each distinct window (varlen can't be used: ")
    for asked in ("varlen", "flex", "xformers"):
        with pytest.raises(InputError, match=f"attention {asked}: .*; set attention to auto or sdpa"):
            choose_attention(asked, needs, HOST, dtype)


def test_xformers_is_taken_before_flex_where_varlen_is_not_to_be_had(xformers_installed: Any) -> None:
    xformers_installed(True)
    assert list(KERNELS) == ["varlen", "xformers", "flex", "sdpa"]
    assert choose_attention("auto", PLAIN, H200, BF16)[0] == "varlen"
    assert choose_attention("auto", DROPOUT, H200, BF16)[0] == "sdpa"
    assert choose_attention("auto", CAPPED, H200, BF16)[0] == "flex"


@pytest.mark.parametrize(
    ("asked", "needs", "device", "dtype", "reason"),
    [
        ("varlen", PLAIN, HOST, BF16, "needs a CUDA device, and this is a CPU"),
        ("varlen", PLAIN, TURING, FP16, r"needs compute capability 8.0 or newer, Tesla T4 has 7.5"),
        ("varlen", PLAIN, replace(H200, compute_capability=None), BF16, "needs compute capability 8.0 or newer"),
        ("varlen", PLAIN, H200, FP32, "computes in bfloat16 or float16, not torch.float32"),
        ("varlen", DROPOUT, H200, BF16, "no dropout and the model's attention_dropout is 0.1"),
        ("varlen", CAPPED, H200, BF16, "no soft-capped logits"),
        ("varlen", MASK_ONLY, H200, BF16, "hands its attention a mask, but no segments"),
        ("varlen", Needs(head_width=264, value_width=264), H200, BF16, "multiples of 8 up to 256, not 264"),
        ("flex", PLAIN, HOST, FP32, "train on CUDA devices only, and this is a CPU"),
        ("flex", PLAIN, TURING, FP16, r"needs? compute capability 8.0 or newer, Tesla T4 has 7.5"),
        ("flex", DROPOUT, H200, BF16, "no dropout and the model's attention_dropout is 0.1"),
        ("flex", MASK_ONLY, H200, BF16, "hands its attention a mask, but no segments"),
        ("flex", Needs(head_width=8, value_width=8), H200, BF16, "head widths from 16, the model has 8"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(
    asked: Any, needs: Needs, device: Device, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(InputError, match=rf"attention {asked}: .*{reason}.*; set attention to auto or sdpa"):
        choose_attention(asked, needs, device, dtype)


@pytest.mark.parametrize("asked", ["varlen", "flex", "sdpa"])
def test_what_is_asked_for_is_taken_where_it_can_be(asked: Any) -> None:
    chosen, decision = choose_attention(asked, PLAIN, H200, BF16)
    assert chosen == asked
    assert decision.reason.endswith("(asked for)")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InputError, match="attention 'flash' is none of auto, varlen, flex, xformers, sdpa"):
        choose_attention("flash", PLAIN, H200, BF16)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_needs_of_each_family(family: str) -> None:
    needs = Needs.of(model_of(family))
    assert (needs.head_width, needs.value_width, needs.mask_only) == (16, 16, False)
    assert needs.extras() == {"gemma2": ["soft-capped logits"], "gpt_oss": ["attention sinks"]}.get(family, [])
    dropping = Needs.of(model_of(family, attention_dropout=0.25))
    assert dropping.dropout == 0.25
    assert dropping.extras()[-1] == "dropout"


def test_dropout_of_attention_is_found_by_whatever_name() -> None:
    """A kernel that has none would leave it out in silence."""
    assert Needs.of(nested_model(attention_dropout=0.25)).dropout == 0.25
    model = model_of("llama")
    model.config.attn_pdrop, model.config.resid_pdrop = 0.125, 0.5
    assert Needs.of(model).dropout == 0.125
