"""Experts on a card: equal to the reference in bf16 and on dirty memory; a grouped step never waits."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, TrainingArguments
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from slipstream.bench import experts as experts_bench
from slipstream.bench.experts import ExpertsBench
from slipstream.bench.experts_reference import use_where, where_experts
from slipstream.data.packing import pack_dataset
from slipstream.device.feed import PackedCollator
from slipstream.model.experts import ExpertsForward, grouped_experts, looped_experts
from slipstream.model.experts_choice import find_experts
from slipstream.model.experts_gate import fuses_gate
from slipstream.model.experts_products import grouped_product
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.model.own_kernels import own_kernels
from slipstream.model.routing import route
from slipstream.train.trainer import Trainer
from slipstream.transform import Options, apply, decisions

FUNCTIONS = pytest.mark.parametrize("function", [grouped_experts, looped_experts])
CLOSE = 0.02
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 4},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 3},
}
TOKENS = 512


def mixture(family: str, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Any:
    settings = {
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        **SETTINGS[family],
        **overrides,
    }
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or not parameter.any():
                parameter.normal_(0, 0.1)
            if name.endswith(("gate.weight", "router.weight")):
                parameter.normal_(0, 0.3)  # few near-ties, which rounding would decide one way or the other
    return model.train()


def dirty() -> None:
    """Leave NaN in memory that is free to be taken."""
    held = [
        torch.full((size,), float("nan"), dtype=torch.bfloat16, device="cuda") for size in (2**24,) * 4 + (2**20,) * 32
    ]
    del held


def computed(function: ExpertsForward, module: Any, index: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    draw = torch.Generator("cuda").manual_seed(5)
    x = torch.randn(len(index), 256, generator=draw, device="cuda").to(dtype).requires_grad_()
    weights = torch.rand(index.shape, generator=draw, device="cuda").requires_grad_()
    grad = torch.randn(x.shape, generator=draw, device="cuda").to(dtype)
    module.zero_grad(set_to_none=True)
    dirty()
    out = function(module, x, index, weights)
    dirty()
    out.backward(grad)
    return {
        "out": out.detach(),
        "x": x.grad,
        "weights": weights.grad,
        **{n: p.grad for n, p in module.named_parameters()},
    }


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], relative: float) -> None:
    for name, expected in theirs.items():
        error = (ours[name].float() - expected.float()).norm() / expected.float().norm()
        assert error <= relative, f"{name}: {float(error):.1e}"


def choices(tokens: int, top_k: int, used: Sequence[int]) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    among = torch.tensor(list(used))
    rows = [among[torch.randperm(len(among), generator=draw)[:top_k]] for _ in range(tokens)]
    return torch.stack(rows).cuda()


@pytest.mark.parametrize(
    ("tokens", "top_k", "used"),
    [
        (300, 2, range(8)),
        (300, 8, range(8)),
        (300, 1, [3]),
        (1, 2, [0, 7]),
        (300, 2, [1, 4, 6]),
        (4096, 4, range(8)),
    ],
    ids=["plain", "all", "all to one", "one token", "gaps", "many"],
)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
@FUNCTIONS
def test_equal_to_the_reference(function: ExpertsForward, family: str, tokens: int, top_k: int, used: Any) -> None:
    module = next(iter(find_experts(mixture(family)).values()))
    index = choices(tokens, top_k, used)
    ours = computed(function, module, index, torch.bfloat16)
    assert_same(ours, computed(where_experts, module, index, torch.bfloat16), CLOSE)
    idle = sorted(set(range(8)) - set(used)) if tokens > 1 else [1, 2, 3]
    for name in ours.keys() - {"out", "x", "weights"}:
        assert ours[name].isfinite().all(), name
        assert not ours[name][idle].any(), name


@FUNCTIONS
def test_the_same_bits_every_time(function: ExpertsForward) -> None:
    module = next(iter(find_experts(mixture("gpt_oss")).values()))
    index = choices(2000, 4, range(8))
    first, second = (computed(function, module, index, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("slots", "inner"), [(300, 2880), (5, 100), (1, 1024)])
def test_the_fused_gate_is_gpt_oss_s(slots: int, inner: int, dtype: torch.dtype) -> None:
    """Against the module's own in float64, clamps in play on both sides, on dirty memory."""
    from slipstream.model.expert_kernels import clamped_gate  # needs Triton

    draw = torch.Generator("cuda").manual_seed(0)
    up = (torch.randn(slots, 2 * inner, generator=draw, device="cuda") * 6).to(dtype).requires_grad_()
    bias = (torch.randn(3, 2 * inner, generator=draw, device="cuda") * 2).to(dtype)
    grad = torch.randn(slots, inner, generator=draw, device="cuda").to(dtype)
    expert = torch.randint(0, 3, (slots,), generator=draw, device="cuda", dtype=torch.int32).sort().values
    dirty()
    out = clamped_gate(up, bias, expert, 1.702, 7.0)
    out.backward(grad)
    exact = up.detach().double().requires_grad_()
    halves = exact + bias.double()[expert.long()]
    assert all(((side > 7) | (side < -7)).any() for side in (halves[..., ::2], halves[..., 1::2]))
    own = GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=7.0), halves)
    own.backward(grad.double())
    rounding = 1e-5 if dtype == torch.float32 else 5e-3
    assert (out - own).norm() <= rounding * own.norm()
    assert (up.grad - exact.grad).norm() <= max(rounding, 1e-3) * exact.grad.norm()  # a tie at a clamp may differ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(300, 4, 2880), (7, 1, 100), (33, 8, 2048)])
def test_the_fused_sum_of_slots(tokens: int, top_k: int, hidden: int, dtype: torch.dtype) -> None:
    """Against plain operations in float64, on dirty memory; the same bits every time."""
    draw = torch.Generator("cuda").manual_seed(0)
    routing = route(torch.randint(0, 5, (tokens, top_k), generator=draw, device="cuda"), 5)
    y = torch.randn(tokens * top_k, hidden, generator=draw, device="cuda").to(dtype).requires_grad_()
    weights = torch.rand(tokens, top_k, generator=draw, device="cuda").requires_grad_()
    grad = torch.randn(tokens, hidden, generator=draw, device="cuda").to(dtype)
    found = []
    for _ in range(2):
        y.grad = weights.grad = None
        dirty()
        out = routing.combine(y, weights)
        dirty()
        out.backward(grad)
        found.append((out.detach(), y.grad, weights.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    exact_y, exact_weights = (x.detach().double().requires_grad_() for x in (y, weights))
    assert not own_kernels(exact_y)
    exact = routing.combine(exact_y, exact_weights)
    exact.backward(grad.double())
    for ours, theirs in zip(found[0], (exact, exact_y.grad, exact_weights.grad), strict=True):
        assert (ours - theirs).norm() <= (1e-5 if dtype == torch.float32 else 5e-3) * theirs.norm()


def test_where_the_gate_is_fused() -> None:
    slots = torch.zeros(1, 256, device="cuda")
    experts = next(iter(find_experts(mixture("gpt_oss")).values())).requires_grad_(False)
    assert fuses_gate(experts, slots)
    assert not fuses_gate(experts, slots.cpu())
    experts.gate_up_proj_bias.requires_grad_(True)
    assert not fuses_gate(experts, slots)
    assert not fuses_gate(next(iter(find_experts(mixture("mixtral")).values())), slots)


def test_float32_is_looped_and_exact() -> None:
    model = apply(mixture("gpt_oss", torch.float32))
    (decision,) = [d for d in decisions(model) if d.name == "experts"]
    assert decision.reason.startswith("loop: ")
    assert "bfloat16" in decision.reason
    module = next(iter(find_experts(model).values()))
    index = choices(300, 2, range(8))
    ours = computed(looped_experts, module, index, torch.float32)
    assert_same(ours, computed(where_experts, module, index, torch.float32), 1e-3)  # tf32 is off, order differs


def test_routing_and_products_do_not_wait() -> None:
    index = choices(300, 4, range(8))
    x = torch.randn(300, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weights = torch.rand(300, 4, device="cuda", requires_grad=True)
    stack = torch.randn(8, 256, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def once() -> None:
        routing = route(index, 8)
        routing.combine(grouped_product(routing.gather(x), stack, routing), weights).float().sum().backward()

    once()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("family", SETTINGS)
def test_a_packed_step_never_waits_and_equals_the_reference(family: str, activations: Any, adapters: bool) -> None:
    documents = [torch.randint(3, 1000, (n,)).tolist() for n in (200, 1, 150, 100)]
    row = PackedCollator(tokens=TOKENS)([{"input_ids": ids} for ids in documents])
    row = {name: value.to("cuda") for name, value in row.items() if name != "labels"}
    gradients, losses = {}, {}
    for arm in ("grouped", "loop", "where"):
        options = AdapterOptions(rank=4, experts=adapters, router=adapters)
        model = add_adapter(mixture(family), options, seed=0).train()
        draw = torch.Generator("cuda").manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.05, generator=draw)
        apply(model, Options(experts="loop" if arm == "where" else arm, activations=activations))
        if arm == "where":
            use_where(model)
        for attempt in range(2):
            model.zero_grad()
            torch.cuda.set_sync_debug_mode("error" if attempt and arm == "grouped" else "default")
            try:
                loss = model(**row).logits.float().square().mean()
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        losses[arm] = float(loss)
        gradients[arm] = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        assert all(g is not None and g.isfinite().all() for g in gradients[arm].values())
    assert any("experts" in name for name in gradients["grouped"]) == adapters
    whole = torch.cat([g.flatten() for g in gradients["where"].values()])
    for arm in ("grouped", "loop"):
        assert losses[arm] == pytest.approx(losses["where"], rel=0.02)
        found = torch.cat([gradients[arm][name].flatten() for name in gradients["where"]])
        assert (found - whole).norm() / whole.norm() < 0.2


def test_whole_training_steps_do_not_sync(tmp_path: Path) -> None:
    """With adapters on experts and router, and the load-balance loss."""

    class Guard(TrainerCallback):
        guarded = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            guard = 4 <= state.global_step < 10
            torch.cuda.set_sync_debug_mode("error" if guard else "default")
            Guard.guarded += guard

    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.01}
    model = add_adapter(mixture("gpt_oss", **asked), AdapterOptions(experts=True, router=True), seed=0)
    apply(model, Options(activations="recompute"))
    documents = [torch.randint(3, 1000, (int(n),)).tolist() for n in torch.randint(2, 200, (100,))]
    rows = pack_dataset(Dataset.from_dict({"input_ids": documents}), TOKENS)
    args = TrainingArguments(
        str(tmp_path),
        max_steps=10,
        per_device_train_batch_size=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        optim="adamw_torch_fused",
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=rows,
        data_collator=PackedCollator(tokens=TOKENS),
        compute_dtype=torch.bfloat16,
        callbacks=[Guard()],
    )
    assert trainer.batch_loss.balance_decision is not None
    assert trainer.batch_loss.balance_decision.on
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert Guard.guarded == 6


def test_a_grouped_forward_and_backward_can_be_captured() -> None:
    module = next(iter(find_experts(mixture("gpt_oss")).values())).requires_grad_(False)
    index = choices(300, 2, range(8))
    x = torch.randn(300, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weights = torch.rand(300, 2, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def once() -> tuple[torch.Tensor, ...]:
        out = grouped_experts(module, x, index, weights)
        return (out, *torch.autograd.grad(out.float().square().sum(), (x, weights)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = once()
    other = choices(301, 2, [1, 4, 6])[1:]
    index.copy_(other)  # other experts, other counts: the graph must follow
    graph.replay()
    expected = once()
    for ours, theirs in zip(captured, expected, strict=True):
        assert (ours.float() - theirs.float()).norm() <= 1e-3 * theirs.float().norm()


@pytest.mark.parametrize("part", ["layer", "scaling", "step"])
def test_the_benchmark_runs(part: Any) -> None:
    asked = ExpertsBench(shapes=("tiny-mixture",), part=part, tokens=512, rounds=4, layers=2)
    rows = experts_bench.run(asked, lambda _: None)["rows"]
    assert all("refused" not in row for row in rows)
    if part == "step":
        for row in rows:
            assert row["arms"]["grouped"]["syncs"] == 0
            assert row["arms"]["where-loop"]["syncs"] > 0
