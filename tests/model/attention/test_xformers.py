"""xFormers: what stands in its way, and what it is handed; a stand-in for the package computes by its definition."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from attending import by_definition, drawn
from slipstream import Segments
from slipstream.cost.hardware import Device
from slipstream.model.attention import Needs, xformers
from slipstream.model.attention.call import Call

TURING = Device("cuda", "Tesla T4", 16 * 2**30, (7, 5), bf16=False, unified_memory=False)
PLAIN = Needs(head_width=64, value_width=64)
FP16, FP32 = torch.float16, torch.float32


@dataclass
class SeqLenInfo:
    """The package's offsets: on the device for its kernel, in Python for its checks."""

    seqstart: torch.Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]


@dataclass
class BlockDiagonalCausalMask:
    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo
    window: int | None = None

    def make_local_attention(self, window_size: int) -> "BlockDiagonalCausalMask":
        return replace(self, window=window_size)


class Package:
    """Stand-in for xFormers: its names, and what its one function was given."""

    def __init__(self, kernels: bool) -> None:
        self.top, self.ops, self.bias = ModuleType("xformers"), ModuleType("xformers.ops"), ModuleType("bias")
        self.top._cpp_lib = ModuleType("xformers._cpp_lib")
        self.top._cpp_lib._built_with_cuda = kernels
        self.ops.memory_efficient_attention = self.attend
        self.bias.BlockDiagonalCausalMask, self.bias._SeqLenInfo = BlockDiagonalCausalMask, SeqLenInfo
        self.calls: list[dict[str, Any]] = []

    def attend(self, q: Any, k: Any, v: Any, *, attn_bias: Any, p: float, scale: float | None) -> torch.Tensor:
        self.calls.append({"bias": attn_bias, "p": p, "k": k, "v": v})
        ends = attn_bias.q_seqinfo.seqstart_py
        lengths = [after - before for before, after in pairwise(ends)]
        return by_definition(
            *(x.transpose(1, 2) for x in (q, k, v)), Call(scale=scale, window=attn_bias.window), lengths
        )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def install(kernels: bool = True) -> Package:
        package = Package(kernels)
        for name, module in [
            ("xformers", package.top),
            ("xformers.ops", package.ops),
            ("xformers.ops.fmha", ModuleType("xformers.ops.fmha")),
            ("xformers.ops.fmha.attn_bias", package.bias),
        ]:
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(xformers, "find_spec", lambda name: object())
        xformers._has_kernels.cache_clear()
        return package

    yield install
    xformers._has_kernels.cache_clear()


@pytest.mark.parametrize(
    ("needs", "device", "dtype", "obstacle"),
    [
        (PLAIN, TURING, FP16, None),
        (PLAIN, replace(TURING, compute_capability=(7, 0)), FP16, None),
        (replace(PLAIN, mask_only=True), TURING, FP16, "a mask, but no segments"),
        (PLAIN, replace(TURING, kind="cpu"), FP16, "need a CUDA device, and this is a CPU"),
        (
            PLAIN,
            replace(TURING, compute_capability=(6, 1)),
            FP16,
            "compute capability 7.0 or newer, Tesla T4 has 6.1",
        ),
        (PLAIN, replace(TURING, compute_capability=None), FP16, "compute capability 7.0 or newer"),
        (PLAIN, TURING, FP32, "bfloat16 or float16, not torch.float32"),
        (replace(PLAIN, softcap=True), TURING, FP16, "it has no soft-capped logits"),
        (replace(PLAIN, sinks=True, dropout=0.1), TURING, FP16, "it has no attention sinks, dropout"),
        (replace(PLAIN, value_width=32), TURING, FP16, "heads as wide as values"),
        (Needs(head_width=264, value_width=264), TURING, FP16, "multiples of 8 up to 256, not 264"),
        (Needs(head_width=36, value_width=36), TURING, FP16, "multiples of 8 up to 256, not 36"),
    ],
)
def test_what_stands_in_its_way(
    installed: Any, needs: Needs, device: Device, dtype: torch.dtype, obstacle: str | None
) -> None:
    installed()
    found = xformers.obstacle(needs, device, dtype)
    assert (found is None) if obstacle is None else (found is not None and obstacle in found)


def test_a_package_without_kernels_is_as_good_as_none(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(kernels=False)
    assert "the installed xFormers has no CUDA kernels" in str(xformers.obstacle(PLAIN, TURING, FP16))
    monkeypatch.setattr(xformers, "find_spec", lambda name: None)
    assert "xFormers is not installed (pip install 'slipstream[xformers]')" in str(
        xformers.obstacle(PLAIN, TURING, FP16)
    )


@pytest.mark.parametrize("total", [12, 14])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_what_it_hands_over_is_the_row(installed: Any, heads: int, groups: int, window: int | None, total: int) -> None:
    package = installed()
    segments = Segments.from_lengths([5, 1, 6], total=total)
    q, k, v = drawn(heads, groups, total)
    call = Call(scale=0.3, window=window)
    found = xformers.kernel(q, k, v, segments, call)
    spans = (5, 1, 6, 2) if total == 14 else (5, 1, 6)
    assert found.shape == (1, total, heads, 8)
    assert torch.allclose(found, by_definition(q, k, v, call, spans), atol=1e-12)
    info = package.calls[0]["bias"].q_seqinfo
    assert info is package.calls[0]["bias"].k_seqinfo
    assert info.seqstart_py == [0, 5, 6, 12, 14][: len(spans) + 1]
    assert info.seqstart.tolist() == info.seqstart_py
    assert info.seqstart.dtype == torch.int32
    assert info.seqstart.data_ptr() == segments.cu_seqlens.data_ptr()  # no copy of our offsets
    assert (info.max_seqlen, info.min_seqlen) == (6, 1)
    assert package.calls[0]["k"].shape == package.calls[0]["v"].shape == (1, total, heads, 8)


def test_one_bias_for_each_window(installed: Any) -> None:
    package = installed()
    segments = Segments.from_lengths([5, 1, 6])
    q, k, v = (x.detach() for x in drawn(2, 1, 12))
    for window in (None, 3, None, 3):
        xformers.kernel(q, k, v, segments, Call(window=window, dropout=0.1))
    biases = [call["bias"] for call in package.calls]
    assert biases[0] is biases[2]
    assert biases[1] is biases[3]
    assert [bias.window for bias in biases[:2]] == [None, 3]
    assert set(segments.builds.values()) == {1}
    assert {call["p"] for call in package.calls} == {0.1}
