import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.errors import InputError
from slipstream.model.lora import AdapterOptions, add_adapter, left_out, load_adapter, resolve_targets
from slipstream.model.state_space import PEFT_REFUSES_IN, passed_by
from slipstream.model.trainable import trainable_summary
from tiny import tiny_model

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
MIXTURE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


class RoutedByLinear(torch.nn.Module):
    """A mixture as model repositories with code of their own still write it: a gate and experts that are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(32, 4)
        self.experts = torch.nn.ModuleList(torch.nn.ModuleDict({"up_proj": torch.nn.Linear(32, 8)}) for _ in range(4))
        self.shared_expert = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(32, 8)})


def leaves(names: list[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def parents(names: list[str]) -> set[str]:
    return {name.split(".")[-2] for name in names}


def with_modules_as_experts() -> PreTrainedModel:
    model = tiny_model()
    model.model.layers[0].mlp = RoutedByLinear()
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(24)[None]).logits


def disturb(model: torch.nn.Module) -> None:
    """Give every trained weight a value of its own (a fresh adapter adds nothing)."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_all_linear_takes_every_linear_layer_of_a_dense_model_but_the_head(kind: str) -> None:
    model = tiny_model(kind)
    targets = resolve_targets(model, AdapterOptions())
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert leaves(targets) == ATTENTION | MLP  # gate_proj among them: an MLP's gate is no router
    assert linear - set(targets) == {"lm_head"}


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe", "mixtral", "olmoe"])
def test_all_linear_leaves_experts_and_router_alone(kind: str) -> None:
    model = tiny_model(kind, **MIXTURE)
    routed = [name for name, _ in model.named_modules() if re.search(r"\b(experts|router|gate)$", name)]
    assert len(routed) >= 4  # the interesting case: two layers with experts and a router each
    targets = resolve_targets(model, AdapterOptions())
    assert leaves(targets) == ATTENTION
    assert len(targets) == 2 * 4


def test_shared_experts_are_dense_but_not_the_gate_beside_them() -> None:
    model = tiny_model("qwen2_moe", **MIXTURE)
    assert isinstance(model.model.layers[0].mlp.shared_expert_gate, torch.nn.Linear)
    targets = resolve_targets(model, AdapterOptions())
    assert parents(targets) == {"self_attn", "shared_expert"}
    assert leaves(targets) == ATTENTION | MLP


def test_dense_layers_that_peft_takes_for_experts_are_left_out_and_it_is_said() -> None:
    model = tiny_model("deepseek_v3", **MIXTURE)
    assert isinstance(model.model.layers[0].mlp.gate_proj, torch.nn.Linear)  # a dense layer before the mixtures
    assert parents(resolve_targets(model, AdapterOptions())) == {"self_attn"}
    told = left_out(model, AdapterOptions())
    assert told is not None
    assert told.reason.startswith("all-linear leaves out model.layers.*.mlp.down_proj, model.layers.*.mlp.gate_proj, ")
    assert left_out(model, AdapterOptions(targets=["q_b_proj"])) is left_out(tiny_model(), AdapterOptions()) is None
    with pytest.raises(InputError, match=r"peft takes model\.layers\.0\.mlp\.up_proj for the experts"):
        resolve_targets(model, AdapterOptions(targets=["q_b_proj", "up_proj"]))


STATE_SPACE: dict[str, dict[str, object]] = {
    "mamba": {},
    "falcon_mamba": {},
    "mamba2": {"num_heads": 4, "expand": 2, "n_groups": 1},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "attn_layer_indices": [1]},
}


@pytest.mark.parametrize("kind", STATE_SPACE)
def test_in_state_space_layers_all_that_is_adapted_learns(kind: str) -> None:
    model = tiny_model(kind, **STATE_SPACE[kind])
    passed = leaves(list(passed_by(model)))
    assert "out_proj" in passed
    told = left_out(model, AdapterOptions())
    assert told is not None
    assert "mixer.out_proj" in told.reason or "mamba.out_proj" in told.reason
    assert told.reason.endswith(", whose adapters the kernels of state-space layers pass by")
    tuned = add_adapter(model, AdapterOptions(), seed=0)
    assert "in_proj" in leaves(tuned.targeted_module_names)
    assert not passed.intersection(leaves(tuned.targeted_module_names))
    tokens = torch.arange(20, 29)[None]
    tuned(input_ids=tokens, labels=tokens).loss.backward()
    learned = [p.grad.abs().sum() for name, p in tuned.named_parameters() if "lora_B" in name and p.grad is not None]
    assert len(learned) == len(tuned.targeted_module_names)
    assert all(gradient > 0 for gradient in learned)


@pytest.mark.parametrize("leaf", ["out_proj", "dt_proj"])
def test_what_state_space_kernels_pass_by_is_refused_by_name(leaf: str) -> None:
    with pytest.raises(InputError, match=f"adapter.targets: '{leaf}' of a state-space layer takes no adapter.*all-lin"):
        resolve_targets(tiny_model("mamba"), AdapterOptions(targets=["in_proj", leaf]))
    assert leaves(resolve_targets(tiny_model("mamba"), AdapterOptions(targets=["x_proj"]))) == {"x_proj"}


def test_peft_refuses_what_it_is_said_to() -> None:
    """The list is peft's own, which it does not give away: one that grows or goes is noticed here."""
    for kind in STATE_SPACE:
        model = tiny_model(kind, **STATE_SPACE[kind])
        names = [name for name in passed_by(model) if name.endswith("out_proj")]
        assert names
        with pytest.raises(ValueError, match="incompatible") if kind in PEFT_REFUSES_IN else nullcontext():
            get_peft_model(model, LoraConfig(target_modules=names))


def test_experts_that_are_modules_are_left_alone_by_name_too() -> None:
    model = with_modules_as_experts()
    expected = {"model.layers.0.mlp.shared_expert.up_proj", "model.layers.1.mlp.up_proj"}
    assert set(resolve_targets(model, AdapterOptions(targets="up_proj"))) == expected
    assert "model.layers.0.mlp.gate" not in resolve_targets(model, AdapterOptions())
    with pytest.raises(InputError, match=r"'mlp\.gate' belongs to the experts or their router"):
        resolve_targets(model, AdapterOptions(targets=["mlp.gate"]))


@pytest.mark.parametrize("targets", ["q_proj, v_proj", ["q_proj", "self_attn.v_proj"]])
def test_named_targets_match_by_their_end(targets: str | list[str]) -> None:
    names = resolve_targets(tiny_model(), AdapterOptions(targets=targets))
    assert names == [f"model.layers.{layer}.self_attn.{leaf}" for layer in (0, 1) for leaf in ("q_proj", "v_proj")]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "k_prj"], r"adapter\.targets: 'k_prj' matches no module; did you mean k_proj"),
        ("proj", r"'proj' matches no module"),  # the end of a name counts only after a dot
        ("mlp", r"'mlp' is a LlamaMLP"),
        ("weight", r"'weight' is a parameter"),
        (" , ", r"names nothing"),
        ("all-linear,lm_head", r"use it alone"),
    ],
)
def test_a_target_that_matches_nothing_is_an_error(targets: str | list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_targets(tiny_model(), AdapterOptions(targets=targets))


def test_fused_experts_cannot_be_named() -> None:
    with pytest.raises(InputError, match=r"'experts\.gate_up_proj' is a parameter \(model\.layers\.0\.mlp\.experts"):
        resolve_targets(tiny_model("qwen3_moe", **MIXTURE), AdapterOptions(targets=["experts.gate_up_proj"]))


def test_the_error_lists_what_there_is() -> None:
    with pytest.raises(InputError, match="there is embed_tokens, q_proj, k_proj, v_proj, o_proj"):
        resolve_targets(tiny_model(), AdapterOptions(targets="query_key_value"))


def test_modules_to_save_must_match_and_are_not_adapted_besides() -> None:
    model = tiny_model()
    with pytest.raises(InputError, match=r"adapter\.modules_to_save: 'head' matches no module; did you mean lm_head"):
        add_adapter(model, AdapterOptions(modules_to_save=["head"]), seed=0)
    saved = AdapterOptions(modules_to_save=["mlp"])
    assert leaves(resolve_targets(model, saved)) == ATTENTION
    with pytest.raises(InputError, match="'up_proj' is trained whole already"):
        resolve_targets(model, AdapterOptions(targets=["up_proj"], modules_to_save=["mlp"]))


@pytest.mark.parametrize(
    "options",
    [
        AdapterOptions(rank=4, alpha=8),
        AdapterOptions(rank=4, alpha=8, rslora=True, targets=["q_proj"], modules_to_save=["lm_head"]),
    ],
)
def test_a_saved_adapter_gives_the_same_logits_in_plain_peft(options: AdapterOptions, tmp_path: Path) -> None:
    base = tiny_model()
    base.save_pretrained(tmp_path / "base")
    model = add_adapter(base, options, seed=0)
    before = logits(model)
    disturb(model)
    expected = logits(model)
    assert not torch.allclose(before, expected)
    model.save_pretrained(tmp_path / "adapter")

    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=0)
    ours = load_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=0)


def test_a_mixtures_adapter_loads_in_plain_peft(tmp_path: Path) -> None:
    base = tiny_model("qwen3_moe", **MIXTURE, decoder_sparse_step=2)  # a dense layer, then a mixture
    base.save_pretrained(tmp_path / "base")
    model = add_adapter(base, AdapterOptions(rank=4), seed=0)
    assert parents(list(model.targeted_module_names)) == {"self_attn"}
    assert not [group.name for group in trainable_summary(model).groups if "experts" in group.name]
    disturb(model)
    model.save_pretrained(tmp_path / "adapter")
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=0)


def test_an_adapter_for_another_model_is_refused(tmp_path: Path) -> None:
    add_adapter(tiny_model(), AdapterOptions(rank=4), seed=0).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="does not fit"):
        load_adapter(tiny_model(hidden_size=48), tmp_path)
    with pytest.raises(InputError, match=r"has no adapter_config\.json"):
        load_adapter(tiny_model(), tmp_path / "elsewhere")


def test_an_adapter_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    add_adapter(tiny_model(), AdapterOptions(rank=4), seed=0).save_pretrained(tmp_path)
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    weights.write_bytes(weights.read_bytes()[:999])
    with pytest.raises(InputError, match=r"the weights in .* are damaged .*; restore it, or delete that folder"):
        load_adapter(tiny_model(), tmp_path)
    weights.unlink()
    with pytest.raises(InputError, match=r"has no adapter_model\.safetensors; restore it, or delete that folder"):
        load_adapter(tiny_model(), tmp_path)
    for text in ("{", "{}", "[]"):
        config.write_text(text)
        with pytest.raises(InputError, match=r"adapter_config\.json is damaged"):
            load_adapter(tiny_model(), tmp_path)


def test_rank_alpha_and_rslora_reach_the_adapters() -> None:
    scaling = {}
    for rslora in (False, True):
        model = add_adapter(tiny_model(), AdapterOptions(rank=4, alpha=8, rslora=rslora, dropout=0.25), seed=0)
        adapted = model.base_model.model.model.layers[0].self_attn.q_proj
        assert adapted.lora_A["default"].weight.shape == (4, 32)
        assert adapted.lora_dropout["default"].p == 0.25
        scaling[rslora] = adapted.scaling["default"]
    assert scaling == {False: 2.0, True: 4.0}


def test_adapters_follow_the_seed_and_leave_the_generator_alone() -> None:
    def adapter_weights(seed: int, drawn_before: int) -> list[torch.Tensor]:
        base = tiny_model()
        torch.manual_seed(drawn_before)
        state = torch.get_rng_state()
        model = add_adapter(base, AdapterOptions(rank=4), seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        return [parameter for name, parameter in model.named_parameters() if "lora_A" in name]

    first, again, other = adapter_weights(0, 1), adapter_weights(0, 2), adapter_weights(1, 1)
    assert len(first) == 14
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


def test_adapters_of_a_bf16_model_are_float32() -> None:
    model = add_adapter(tiny_model().to(torch.bfloat16), AdapterOptions(), seed=0)
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {torch.bfloat16}


def test_the_summary_counts_and_names_what_is_trained() -> None:
    base = tiny_model()
    whole = trainable_summary(base)
    size = sum(parameter.numel() for parameter in base.parameters())
    assert (whole.trainable, whole.total) == (size, size)  # kind none: all of the model is trained

    model = add_adapter(base, AdapterOptions(rank=4, targets=["q_proj"], modules_to_save=["lm_head"]), seed=0)
    summary = trainable_summary(model)
    names = {group.name: (group.tensors, group.parameters) for group in summary.groups}
    assert names == {
        "model.layers.*.self_attn.q_proj.lora_A": (2, 2 * 4 * 32),
        "model.layers.*.self_attn.q_proj.lora_B": (2, 2 * 32 * 4),
        "lm_head.weight": (1, 320 * 32),
    }
    assert summary.trainable == 2 * 2 * 4 * 32 + 320 * 32
    assert f"{summary.trainable:,} of {summary.total:,}" in str(summary)
