"""Between compiled parts nothing is copied: gradients of queries, keys and values go on as the kernel wrote them."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.attention.varlen as library
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.profiler import ProfilerActivity, profile, record_function

from packed import documents, gradients, model_of, row_of, with_adapter
from slipstream import Options, apply
from slipstream.model.attention import varlen
from slipstream.step import regional
from slipstream.step.regional import CompiledLayers

INSIDE = "inside a compiled part or a kernel"
MOVES = ("aten::copy_", "aten::fill_", "aten::zero_", "aten::cat")
TOKENS = 48


class Flash(torch.autograd.Function):
    """Causal attention of one document, laid out as flash kernels do: [T, H, D] in, out and as gradients."""

    backwards: int

    @staticmethod
    def forward(ctx: Any, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, scale: float) -> torch.Tensor:
        with record_function(INSIDE):
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in (q_THD, k_TGD, v_TGD)]
                out = attended(*inputs, scale)
            ctx.inputs, ctx.out = inputs, out
            return out.detach().contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with record_function(INSIDE):
            Flash.backwards += 1
            found = torch.autograd.grad(ctx.out, ctx.inputs, grads[0])
            q_THD, k_TGD, v_TGD = (grad.contiguous() for grad in found)
            return q_THD, k_TGD, v_TGD, None


def attended(q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, scale: float) -> torch.Tensor:
    k_THD, v_THD = (x.repeat_interleave(q_THD.shape[1] // x.shape[1], 1) for x in (k_TGD, v_TGD))
    scores_HTT = torch.einsum("thd,shd->hts", q_THD, k_THD) * scale
    hidden = torch.ones(scores_HTT.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hts,shd->thd", scores_HTT.masked_fill(hidden, -torch.inf).softmax(-1), v_THD)


@pytest.fixture(autouse=True)
def _varlen_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``varlen`` over the stand-in for its kernel; layers are traced for forward and backward, and run as traced."""

    def varlen_attn(q: Any, k: Any, v: Any, *rest: Any, scale: float, enable_gqa: bool = False, **named: Any) -> Any:
        return Flash.apply(q, k, v, scale)

    def as_traced(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with record_function(INSIDE):
                return graph(*args)

        return make_boxed_func(run)

    compile_it, backend = torch.compile, aot_autograd(fw_compiler=as_traced)
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_it(function, backend=backend, **options))
    monkeypatch.setattr(library, "varlen_attn", varlen_attn)
    monkeypatch.setattr(varlen, "obstacle", lambda *_: None)
    monkeypatch.setattr(Flash, "backwards", 0, raising=False)
    varlen._grouped_heads.cache_clear()
    torch._dynamo.reset()
    yield
    varlen._grouped_heads.cache_clear()
    torch._dynamo.reset()  # code traced for this backend serves no other


def model_with(family: str, layers: int, adapter: bool) -> Any:
    """Four query heads, two of keys and values; no two sizes are the same."""
    sizes = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = model_of(family, **sizes, hidden_size=40, head_dim=16)
    return apply(with_adapter(model) if adapter else model, Options(attention="varlen"))


def moved(family: str, layers: int, adapter: bool) -> tuple[Counter[str], dict[str, torch.Tensor]]:
    """Of a second pass: what was copied or filled between compiled parts and kernels, of a row's length; gradients."""
    model = model_with(family, layers, adapter)
    row = {name: value for name, value in row_of(documents((TOKENS,))).items() if name != "labels"}
    compiled = CompiledLayers(model.get_decoder())
    with compiled.active():
        model(**row).logits.square().mean().backward()
        model.zero_grad()
        before = Flash.backwards
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            model(**row).logits.square().mean().backward()
    assert Flash.backwards == before + layers
    return Counter(map(_described, filter(_moves_a_row, found.events()))), gradients(model)


def _moves_a_row(event: Any) -> bool:
    shapes = event.input_shapes
    if event.name not in MOVES or not shapes or TOKENS not in shapes[0] or len(shapes[0]) < 3:
        return False
    while event is not None:
        if event.name == INSIDE:
            return False
        event = event.cpu_parent
    return True


def _described(event: Any) -> str:
    return f"{event.name} {event.input_shapes[0]}"


@pytest.mark.parametrize(("family", "adapter"), [("qwen3", True), ("llama", False)])
def test_nothing_is_copied_between_compiled_parts(family: str, adapter: bool) -> None:
    few, _ = moved(family, 1, adapter)
    many, _ = moved(family, 3, adapter)
    assert many == few, "as many in three layers as in one"


def _with_rows_taken_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = varlen.kernel

    def by_index(query: Any, key: Any, value: Any, segments: Any, call: Any) -> Any:
        return kernel(*(x[0][None] for x in (query, key, value)), segments, call)

    monkeypatch.setattr(varlen, "kernel", by_index)


def _with_contiguous_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def contiguous() -> Any:
        # by its own means: an option that monkeypatch puts back is gone for the rest of the process
        return torch._functorch.config.patch({"guess_tangent_strides_as_outputs": False})

    monkeypatch.setattr(regional, "_gradients_laid_out_as_outputs", contiguous)


@pytest.mark.parametrize("spoil", [_with_rows_taken_by_index, _with_contiguous_gradients])
def test_copies_would_be_seen_and_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Either cause alone copies all three gradients of a layer; without them gradients are the same."""
    spared, expected = moved("qwen3", 2, adapter=False)
    spoil(monkeypatch)
    torch._dynamo.reset()
    spoiled, found = moved("qwen3", 2, adapter=False)
    copies = {name: count for name, count in (spoiled - spared).items() if name.startswith("aten::copy_")}
    assert sum(copies.values()) >= 3 * 2
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any()
        assert torch.equal(found[name], gradient), name
