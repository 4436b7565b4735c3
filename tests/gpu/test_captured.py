"""The captured step on a card: the same losses and gradients, one graph a shape, no sync, and nothing left behind."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from packed import documents
from slipstream import InputError, Options, PackedCollator, TrainStep, apply
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.train.loss import summed_cross_entropy
from slipstream.transform import base_model

TOKENS = 1024
LENGTHS = [(300, 200, 17, 1, 400), (90,) * 11, (1000,), (5,) * 150, (600, 424)]


def model_of(dtype: torch.dtype = torch.bfloat16, dropout: float = 0.0):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1000,
    )
    model = LlamaForCausalLM(config).to("cuda", dtype)
    return add_adapter(model, AdapterOptions(rank=8, dropout=dropout), seed=0).train()


def mixture(layers: int, chosen: int):
    """gpt-oss with four experts, of which each token goes to ``chosen``."""
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=chosen,
        sliding_window=64,
        vocab_size=1000,
        pad_token_id=0,
    )
    return GptOssForCausalLM(config).to("cuda", torch.bfloat16)


def batches(count: int, tokens: int = TOKENS) -> list[dict]:
    collate = PackedCollator(tokens=tokens)
    return [collate(documents(LENGTHS[i % len(LENGTHS)], seed=i)) for i in range(count)]


def stepping(
    mode: str,
    model,
    *,
    activations: str = "keep",
    attention: str = "auto",
    lr: float = 1e-3,
    kind=torch.optim.AdamW,
    dtype: torch.dtype | None = None,
) -> TrainStep:
    apply(model, Options(activations=activations, attention=attention))
    trained = [p for p in model.parameters() if p.requires_grad]
    return TrainStep(model, kind(trained, lr=lr, fused=True), mode, dtype=dtype)


def losses(step: TrainStep, count: int = 10) -> list[float]:
    return [float(step(batch)) for batch in batches(count)]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("mode", ["compiled", "captured"])
def test_every_mode_learns_the_same(mode: str, activations: str) -> None:
    step = stepping(mode, model_of(), activations=activations)
    found = losses(step)
    assert step.mode == mode, step.decisions
    eager = losses(stepping("eager", model_of(), activations=activations))
    again = losses(stepping("eager", model_of(), activations="keep"))
    assert len(set(eager)) == len(eager)
    spread = max(abs(a - b) for a, b in zip(eager, again, strict=True))
    assert found == pytest.approx(eager, abs=max(4 * spread, 5e-3))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_in_float32_modes_agree_to_rounding(activations: str) -> None:
    """sdpa, whose mask is made inside the graph from the boundaries in the buffers; SGD, which keeps rounding small."""
    asked = {
        "activations": activations,
        "attention": "sdpa",
        "lr": 0.3,
        "kind": torch.optim.SGD,
        "dtype": torch.float32,  # on a card that multiplies bfloat16, float32 weights would run under its autocast
    }
    step = stepping("captured", model_of(torch.float32), **asked)
    found = losses(step)
    assert step.mode == "captured", step.decisions
    eager = losses(stepping("eager", model_of(torch.float32), **asked))
    assert found == pytest.approx(eager, abs=2e-5)


def test_gradients_are_eagers() -> None:
    """No update: the same batch again gives the same gradient, and another batch another one."""
    captured, eager = model_of(), model_of()
    steps = stepping("captured", captured, lr=0.0), stepping("eager", eager, lr=0.0)
    seen = []
    for step, model in zip(steps, (captured, eager), strict=True):
        found = []
        for batch in batches(5):
            step.optimizer.zero_grad = lambda set_to_none=True: None
            step(batch)
            found.append(torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.requires_grad]))
            for parameter in model.parameters():
                parameter.grad = None
        seen.append(found)
    for ours, theirs in zip(*seen, strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()
    assert (seen[0][0] - seen[0][1]).norm() > 0.1 * seen[0][0].norm()


def test_batches_of_a_step_are_summed() -> None:
    several, one = stepping("captured", model_of()), stepping("eager", model_of())
    for index in range(4):
        parts = batches(8)[2 * index : 2 * index + 2]
        assert float(several(parts)) == pytest.approx(float(one(parts)), abs=5e-3)
        assert float(several.grad_norm) == pytest.approx(float(one.grad_norm), rel=0.03)
    assert several.mode == "captured"


def test_few_graphs_serve_all_rows_and_share_memory() -> None:
    step = stepping("captured", model_of())
    losses(step, 5)
    recorded = step.recordings
    assert 2 <= recorded <= 4
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    losses(step, 15)
    assert step.recordings == recorded
    assert torch.cuda.memory_reserved() == before


def test_it_never_waits(tmp_path: Path) -> None:
    step = stepping("captured", model_of(), activations="recompute")
    losses(step, 5)
    given = [{name: value.pin_memory() for name, value in batch.items()} for batch in batches(5)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in given:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.mode == "captured"


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_dropout_draws_anew_in_each_replay(activations: str) -> None:
    step = stepping("captured", model_of(dropout=0.5), activations=activations, lr=0.0)
    batch = batches(1)[0]
    torch.nn.init.normal_(next(p for n, p in step.model.named_parameters() if "lora_B" in n), std=1.0)
    for name, parameter in step.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.5)
    found = {round(float(step(batch)), 5) for _ in range(4)}
    assert step.mode == "captured", step.decisions
    assert len(found) > 2


def test_evaluation_and_generation_in_between_change_nothing() -> None:
    disturbed, model = stepping("captured", copy.deepcopy(model_of())), None
    model = disturbed.model
    calm = stepping("captured", model_of())
    for index, batch in enumerate(batches(8)):
        assert float(disturbed(batch)) == pytest.approx(float(calm(batch)), abs=2e-3)
        if index % 3 == 2:
            model.eval()
            row = {name: value.to("cuda") for name, value in batch.items()}
            with torch.no_grad():
                logits = model(**{name: value for name, value in row.items() if name != "labels"}).logits
                assert float(summed_cross_entropy(logits, row["labels"])) > 0
                model.generate(torch.ones(1, 5, dtype=torch.int64, device="cuda"), max_new_tokens=3, do_sample=False)
            model.train()


def test_steps_of_other_modes_may_come_before_and_between() -> None:
    """A parameter's node in the graph belongs to the stream of the forward that made it."""
    model = model_of()
    eager = stepping("eager", model, lr=0.0)
    captured = TrainStep(model, eager.optimizer, "captured")
    for index, batch in enumerate(batches(6)):
        first, second = (eager, captured) if index % 2 else (captured, eager)
        assert float(first(batch)) == pytest.approx(float(second(batch)), abs=2e-3)
    assert captured.mode == "captured", captured.decisions


def test_replaced_weights_are_recorded_anew() -> None:
    step = stepping("captured", model_of(), lr=0.0)
    batch = batches(1)[0]
    before = float(step(batch))
    for name, parameter in step.model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn_like(parameter)
    assert abs(float(step(batch)) - before) > 1e-3
    assert step.recordings == 2


def test_a_capture_that_fails_goes_on_compiled() -> None:
    model = model_of()
    step = stepping("captured", model)

    def asks(module: torch.nn.Module, args: tuple, output: object) -> None:
        (output[0] if isinstance(output, tuple) else output).sum().item()

    handle = base_model(model).get_decoder().layers[1].register_forward_hook(asks)
    found = losses(step)
    assert step.mode == "compiled"
    assert "recording failed" in str(step.decisions[0])
    handle.remove()
    assert found == pytest.approx(losses(stepping("eager", model_of())), abs=5e-3)


def test_closing_gives_memory_and_model_back() -> None:
    model = apply(model_of())
    before = {id(module): set(vars(module)) for module in model.modules()}
    torch.cuda.synchronize()
    step = stepping("captured", model)
    losses(step, 5)
    held = torch.cuda.memory_reserved()
    step.close()
    assert torch.cuda.memory_reserved() < held
    assert {id(module): set(vars(module)) for module in model.modules()} == before


def test_sinks_and_windows_are_captured() -> None:
    """gpt-oss as it is, its experts by transformers."""
    found = []
    for mode in ("captured", "eager"):
        model = mixture(layers=4, chosen=2)
        model = add_adapter(model, AdapterOptions(rank=8, targets="q_proj,k_proj,v_proj,o_proj"), seed=0).train()
        step = stepping("auto" if mode == "captured" else "eager", model)
        found.append(losses(step, 6))
        told = step.decisions
        assert step.mode in (mode, "compiled"), told
    assert found[0] == pytest.approx(found[1], abs=1e-2)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_mixtures_gradients_are_eagers(adapters: bool) -> None:
    """gpt-oss with grouped experts; each token goes to all of them, so that no rounding sends one elsewhere."""
    found = []
    for mode in ("captured", "eager"):
        model = mixture(layers=3, chosen=4)
        model = add_adapter(model, AdapterOptions(rank=8, experts=adapters), seed=0).train()
        draw = torch.Generator("cuda").manual_seed(3)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for parameter in trained.values():
            parameter.data = torch.randn(parameter.shape, generator=draw, device="cuda") * 0.1
        before = {name: parameter.detach().clone() for name, parameter in trained.items()}
        step = stepping(mode, model, kind=torch.optim.SGD, lr=1.0)
        step.clip = 0.0
        step(batches(1)[0])
        assert step.mode == mode, step.decisions
        found.append({name: before[name] - parameter.detach() for name, parameter in trained.items()})
    captured, eager = found
    assert any("experts" in name for name in eager) == adapters
    for name, gradient in eager.items():
        assert gradient.norm() > 0, name
        assert (captured[name] - gradient).norm() < 0.15 * gradient.norm(), name


def test_memory_that_runs_out_is_told() -> None:
    model = model_of()
    step = stepping("captured", model)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**24) / total)
    try:
        with pytest.raises(
            InputError, match=r"out of memory while recording a step of 16,384 tokens.*Lower packing.tokens"
        ):
            step(PackedCollator(tokens=16384)(documents((4000,) * 4)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
