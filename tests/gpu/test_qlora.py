"""Four-bit weights on a card: the gradients of what they stand for, no waits, one graph, captured or compiled."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from packed import assert_close_gradients, documents, gradients, row_of
from slipstream import Options, apply
from slipstream.model.load import LoadOptions, load_model
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.model.merge import merge_adapter
from slipstream.model.quantize import dequantise, quantised_modules
from slipstream.train.loss import summed_cross_entropy
from slipstream.train.optimizers import MasterAdamW, choose_optimizer
from slipstream.train.options import TrainOptions

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the extra nf4")

NF4 = LoadOptions(quantize="nf4", dtype="bfloat16")
LENGTHS, TOKENS = (200, 1, 90, 300, 31, 350), 1024
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint on disk."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=1000,
    )
    place = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).bfloat16().save_pretrained(place)
    return place


def adapted(model: Any) -> Any:
    """A LoRA that does something: random on both sides."""
    wrapped = add_adapter(model, AdapterOptions(rank=8), seed=0)
    generator = torch.Generator(device="cuda").manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02, generator=generator)
    return wrapped.train()


def four_bit(folder: Path) -> Any:
    return adapted(load_model(str(folder), NF4, device="cuda"))


def on_card() -> dict[str, Any]:
    row = row_of(documents(LENGTHS), TOKENS)
    return {name: value.to("cuda") for name, value in row.items()}


def loss_of(model: nn.Module, row: dict[str, Any]) -> torch.Tensor:
    inputs = {name: value for name, value in row.items() if name != "labels"}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return summed_cross_entropy(model(**inputs).logits, row["labels"]) / TOKENS


def test_gradients_are_those_of_the_plain_weights(folder: Path) -> None:
    row, made = on_card(), []
    for turn_back in (False, True):
        base = load_model(str(folder), NF4, device="cuda")
        if turn_back:
            base = dequantise(base, torch.bfloat16).to("cuda")
        assert bool(quantised_modules(base)) is not turn_back
        model = apply(adapted(base))
        loss = loss_of(model, row)
        loss.backward()
        made.append((loss.item(), gradients(model)))
    assert made[0][0] == pytest.approx(made[1][0], rel=1e-3)
    assert_close_gradients(made[0][1], made[1][1], 0.02)


def test_card_and_host_choose_the_same_codes(folder: Path) -> None:
    plain = [dequantise(load_model(str(folder), NF4, device=device), torch.float32) for device in ("cuda", "cpu")]
    original = load_model(str(folder), LoadOptions(dtype="float32"))
    for name, _ in original.named_parameters():
        card, host = (model.get_parameter(name) for model in plain)
        assert (card - host).abs().mean() <= 1e-2 * original.get_parameter(name).abs().mean(), name


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_forward_and_backward_wait_for_nothing(folder: Path, activations: Any) -> None:
    model = apply(four_bit(folder), Options(activations=activations))
    row = on_card()
    for _ in range(2):
        loss_of(model, row).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_of(model, row).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert gradients(model)


def test_a_captured_pass_gives_the_same_gradients(folder: Path) -> None:
    model = apply(four_bit(folder))
    row = on_card()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            loss_of(model, row).backward()
    torch.cuda.current_stream().wait_stream(side)
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = loss_of(model, row)
        loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    graph.replay()
    first = loss.item()
    assert_close_gradients(gradients(model), expected, 1e-2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
    graph.replay()
    assert loss.item() != first  # it reads the weights, not a memory of them


def test_compiled_layers_give_the_same_gradients(folder: Path) -> None:
    base = load_model(str(folder), NF4, device="cuda")
    model = adapted(base)
    ids = torch.arange(512, device="cuda")[None] % 1000

    def trained() -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        logits.float().square().mean().backward()
        return gradients(model)

    eager = trained()
    torch._dynamo.reset()
    for layer in base.model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    assert_close_gradients(trained(), eager, 0.05)


def test_the_merged_model_gives_the_adapted_models_logits(folder: Path, tmp_path: Path) -> None:
    model = four_bit(folder).eval()
    ids = torch.arange(200, device="cuda")[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits.float()
        with model.disable_adapter():
            change = (expected - model(input_ids=ids).logits.float()).norm()
    model.save_pretrained(tmp_path / "adapter")
    base = dequantise(load_model(str(folder), NF4, device="cuda"), torch.bfloat16)
    count = sum(parameter.numel() for parameter in base.parameters())
    merge_adapter(base, tmp_path / "adapter", dtype="bfloat16", base_parameters=count).save_pretrained(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").to("cuda")
    assert plain.dtype == torch.bfloat16
    with torch.no_grad():
        difference = (plain(input_ids=ids).logits.float() - expected).norm()
    assert change > 0
    assert difference < 0.2 * change


def test_rows_of_new_tokens_wait_for_nothing(folder: Path) -> None:
    base = load_model(str(folder), LoadOptions(dtype="bfloat16"), device="cuda")
    wrapped = add_adapter(base, AdapterOptions(rank=8), seed=0, new_tokens=[7, 9, 998]).train()
    model, row = apply(wrapped), on_card()
    loss_of(model, row).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_of(model, row).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("trainable_tokens_delta" in name for name in gradients(model)) == 2


# Optimizers


def weights_with_gradients(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((512, 256), (300, 128), (16,)):
        weight = nn.Parameter(torch.randn(shape, generator=generator).to("cuda", dtype))
        weight.grad = torch.randn(shape, generator=generator).to("cuda", dtype)
        made.append(weight)
    return made


def waits_of(step: Callable[[], Any]) -> list[str]:
    """Synchronising calls of ``step``, which has run before."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        step()
    names = [event.name for event in profiler.events()]
    assert any("Launch" in name for name in names), "the trace must hold runtime calls"
    return [name for name in names if name in WAITS]


def eight_bit(chosen: list[nn.Parameter]) -> torch.optim.Optimizer:
    choice = choose_optimizer(TrainOptions(optimizer="adamw8bit"), nn.Module())
    assert choice is not None
    return choice[0](chosen, **{**choice[1], "lr": 0.01})


def test_eight_bits_do_not_wait() -> None:
    import bitsandbytes

    ours = eight_bit(weights_with_gradients(torch.float32))
    theirs = bitsandbytes.optim.AdamW8bit(weights_with_gradients(torch.float32), lr=0.01)
    their_waits, our_waits = waits_of(theirs.step), waits_of(ours.step)
    assert len(our_waits) <= 2  # the profiler's own, where it begins and ends
    assert len(their_waits) >= 2 * 3  # steps and weights


@pytest.mark.parametrize("on_side_stream", [False, True])
def test_eight_bits_are_bitsandbytes_own(on_side_stream: bool) -> None:
    import bitsandbytes

    theirs, ours = weights_with_gradients(torch.float32), weights_with_gradients(torch.float32)
    reference = bitsandbytes.optim.AdamW8bit(theirs, lr=0.01)
    optimizer = eight_bit(ours)
    for group in (reference, optimizer):
        group.param_groups[0]["weight_decay"] = 0.0
    for _ in range(5):
        reference.step()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if on_side_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            optimizer.step()
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_masters_do_not_wait_and_match_torch() -> None:
    ours = weights_with_gradients(torch.bfloat16)
    exact = [nn.Parameter(weight.detach().float()) for weight in ours]
    for parameter, weight in zip(exact, ours, strict=True):
        assert weight.grad is not None
        parameter.grad = weight.grad.float()
    optimizer, reference = MasterAdamW(ours, lr=0.01), torch.optim.AdamW(exact, lr=0.01, weight_decay=0.0, fused=True)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(2):
        reference.step()
    for weight, parameter in zip(ours, exact, strict=True):
        assert torch.equal(optimizer.state[weight]["master"], parameter)
        assert torch.equal(weight, parameter.bfloat16())
