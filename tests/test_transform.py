"""``apply`` and ``restore`` on one instance; models that can't be trained packed are refused, never run wrong."""

import copy
import re
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import slipstream
from packed import documents, logits_alone, logits_of, model_of, row_of, with_adapter
from slipstream import InputError, Options, Segments, apply, decisions, restore, transform
from slipstream.memory.policy import MemoryOptions, Situation, choose_activations
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.transform import ATTRIBUTE, base_model, packing_decision
from tiny import tiny_model

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
BY_MASK = ["stablelm", "nemotron"]
"""Their layers have attention of transformers' new kind, and keep unknown arguments from it, but not a mask."""
OWN_ATTENTION: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 2},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
}
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {},
    "falcon_h1": {},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "rwkv": {},
}
HIDDEN_WINDOWS: dict[str, dict[str, Any]] = {
    "phimoe": {"sliding_window": 4, **MOE},
    "llama4_text": {"attention_chunk_size": 4, "intermediate_size_mlp": 32, "num_local_experts": 2},
    "qwen2_moe": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
}


def packing_of(model: nn.Module) -> Any:
    return next(decision for decision in decisions(model) if decision.name == "packing")


# ------------------------------------------------------------------------------------------------------ what apply does


def test_decisions_tell_what_was_chosen_and_why() -> None:
    model = model_of("llama")
    assert decisions(model) == []
    assert apply(model) is model
    found = {decision.name: decision for decision in decisions(model)}
    assert set(found) == {"attention", "recompute", "offload", "packing", "experts", "norms"}
    assert found["attention"].on
    assert "sdpa" in found["attention"].reason
    assert "CPU" in found["attention"].reason
    assert not found["recompute"].on
    assert found["packing"].on
    assert not found["experts"].on
    found.clear()
    decisions(model).clear()
    assert len(decisions(model)) == 6  # a copy


def test_a_named_choice_that_cannot_be_honoured_is_refused_and_changes_nothing() -> None:
    model = model_of("llama")
    with pytest.raises(InputError, match=r"attention varlen: it needs a CUDA device.*set attention to auto or sdpa"):
        apply(model, Options(attention="varlen"))
    assert not hasattr(model, ATTRIBUTE)
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks
    assert not model.get_decoder()._forward_pre_hooks


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"activations": "offlod"}, "offlod does not fit; give one of auto, keep, recompute, offload"),
        ({"attention": "flash"}, "flash does not fit; give one of auto, varlen, flex, xformers, sdpa"),
        ({"attention": ["sdpa"]}, "[sdpa] does not fit; give one of auto, varlen, flex, xformers, sdpa"),
        ({"experts": "sorted"}, "sorted does not fit; give one of auto, grouped, loop"),
        ({"experts": None}, "null does not fit; give one of auto, grouped, loop"),
        *(
            ({"buffers": wrong}, f"{told} does not fit; give auto, or a whole number >= 1 and <= 1,024")
            for wrong, told in ((0, "0"), (-3, "-3"), (1.5, "1.5"), (True, "true"), ("two", "two"), (1025, "1025"))
        ),
        *(
            ({"host_limit": wrong}, f"{told} does not fit; give a number > 0 and <= 1,048,576, or null")
            for wrong, told in ((float("nan"), ".nan"), (float("inf"), ".inf"), (-1, "-1"), (0, "0"), ("8", "'8'"))
        ),
        *(({"tiles": wrong}, "does not fit; give one of auto, none, or a whole number >= 16") for wrong in (15, 64.0)),
        *(
            ({"tokens": wrong}, "does not fit; give a whole number >= 1 and <= 2,147,483,647, or null")
            for wrong in (0, -5, 2**31, 4096.0, "4096", False)
        ),
        *(
            (
                {"compute_dtype": wrong},
                "does not fit; give one of torch.float32, torch.bfloat16, torch.float16, or None",
            )
            for wrong in ("bfloat16", torch.int8, 16, torch.tensor)
        ),
    ],
)
def test_options_are_checked_when_they_are_made(options: Any, refused: str) -> None:
    (name,) = options
    with pytest.raises(InputError, match=f"^Options.{name}: .*{re.escape(refused)}$"):
        Options(**options)


def test_all_options_that_do_not_fit_are_told_in_one_message() -> None:
    with pytest.raises(InputError, match=r"Options\.attention: a does not fit; .*; Options\.buffers: 0 does not fit; "):
        Options(attention="a", buffers=0)  # type: ignore[arg-type]


def test_options_take_what_a_recipe_takes() -> None:
    """One annotation says it for both."""
    ours, theirs = (get_type_hints(kind, include_extras=True) for kind in (Options, MemoryOptions))
    assert {name: ours[name] for name in theirs} == theirs
    made = Options(host_limit=8, buffers=1024, tiles=16, tokens=2**31 - 1, compute_dtype=torch.bfloat16)
    assert (made.host_limit, made.buffers, made.tiles) == (8, 1024, 16)


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(InputError, match="Linear is not a Hugging Face causal language model"):
        apply(nn.Linear(2, 2))  # type: ignore[type-var]
    with pytest.raises(InputError, match=r"options \{'attention': 'sdpa'\}: apply takes slipstream.Options"):
        apply(model_of("llama"), {"attention": "sdpa"})  # type: ignore[arg-type]


def test_applying_again_replaces_the_first_call() -> None:
    model = apply(model_of("llama"), Options(activations="recompute"))
    assert model.model.layers[0].gradient_checkpointing
    apply(model, Options(activations="keep"))
    assert not model.model.layers[0].gradient_checkpointing
    assert len(model.get_decoder()._forward_pre_hooks) == 3
    restore(model)
    assert not hasattr(model, ATTRIBUTE)
    assert model.config._attn_implementation == "sdpa"
    assert restore(model) is model  # nothing left to undo


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("activations", ["auto", "keep", "recompute"])
def test_the_decision_on_recomputing_is_what_happens(given: bool, activations: Any) -> None:
    model = model_of("llama")
    if given:
        model.gradient_checkpointing_enable()
    apply(model, Options(activations=activations))
    calls: list[nn.Module] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, *_: calls.append(module))
    logits_of(model, row_of(documents())).sum().backward()
    on = next(decision.on for decision in decisions(model) if decision.name == "recompute")
    assert on == (activations == "recompute" or (activations == "auto" and given))
    assert len(calls) == (2 if on else 1)


class Compiled(nn.Module):
    """As torch.compile wraps a model: what it lacks itself is looked up in the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "_orig_mod" else getattr(self._orig_mod, name)


class Wrapped(nn.Module):
    """As DistributedDataParallel wraps a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> Any:
        return self.module(**inputs)


@pytest.mark.parametrize("wrap", [with_adapter, Wrapped, Compiled, lambda m: Compiled(Wrapped(with_adapter(m)))])
def test_the_base_model_is_found_below_wrappers(wrap: Any) -> None:
    model = model_of("llama")
    wrapped = wrap(model)
    assert base_model(wrapped) is model
    apply(wrapped)
    assert hasattr(model, ATTRIBUTE)
    assert decisions(wrapped) == decisions(model) != []
    restore(wrapped)
    assert not hasattr(model, ATTRIBUTE)


def test_an_applied_model_can_be_copied() -> None:
    model, row = apply(model_of("llama")).eval(), row_of(documents())
    twin = copy.deepcopy(model)
    restore(twin)
    assert not hasattr(twin, ATTRIBUTE)
    assert not twin.get_decoder()._forward_pre_hooks
    assert hasattr(model, ATTRIBUTE)
    assert len(model.get_decoder()._forward_pre_hooks) == 3
    with torch.no_grad():
        assert torch.isfinite(logits_of(model, row)).all()


# --------------------------------------------------------------------------------------------------------- bad batches


def test_a_mask_beside_segments_is_refused() -> None:
    """trl#3673: a mask in the batch would make boundaries ambiguous."""
    model, row = apply(model_of("llama")), row_of(documents())
    with pytest.raises(InputError, match=r"attention_mask of shape \[1, 48\] beside segments"):
        model(**row, attention_mask=torch.ones(1, 48, dtype=torch.int64))


def test_segments_of_another_row_are_refused() -> None:
    model, row = apply(model_of("llama")), row_of(documents())
    for total in (47, 49):
        row["segments"] = Segments.from_lengths([9, 1, 17, 5, 1, 12], total=total)
        with pytest.raises(InputError, match=rf"segments hold {total} tokens.*shape \[1, 48\].*\[1, {total}\]"):
            logits_of(model, row)


@pytest.mark.parametrize("shape", [(2, 48), (2, 24), (0, 48)])
def test_rows_side_by_side_are_refused(shape: tuple[int, int]) -> None:
    model, row = apply(model_of("llama")), row_of(documents())
    with pytest.raises(InputError, match=r"it must be \[1, 48\]"):
        model(input_ids=torch.zeros(shape, dtype=torch.int64), segments=row["segments"])


def test_a_cache_beside_segments_is_refused() -> None:
    model, row = apply(model_of("llama")).eval(), row_of(documents())
    with torch.no_grad():
        past = model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
        with pytest.raises(InputError, match=r"keys of shape \[1, 1, 51, 16\].*without a cache"):
            model(input_ids=row["input_ids"], segments=row["segments"], past_key_values=past)


def test_segments_edited_in_place_are_refused() -> None:
    """unsloth#10879: no stale boundaries after an edit in place."""
    model, row = apply(model_of("llama")), row_of(documents())
    logits_of(model, row)
    row["segments"].cu_seqlens[1] = 4
    with pytest.raises(RuntimeError, match="edited in place"):
        logits_of(model, row)


def test_attention_changed_after_apply_is_refused() -> None:
    model, row = apply(model_of("llama")), row_of(documents())
    logits_of(model, row)
    for other in ("sdpa", "eager"):
        model.set_attn_implementation(other)
        with pytest.raises(InputError, match=f"attention was set to {other} after apply.*apply again"):
            logits_of(model, row)
    logits_of(apply(model), row)


# ---------------------------------------------------------------------------------- models that can't be trained packed


@pytest.mark.parametrize("wrap", [lambda model: model, with_adapter])
@pytest.mark.parametrize("kind", BY_MASK)
def test_a_model_that_keeps_segments_from_its_attention_gets_the_mask(kind: str, wrap: Any) -> None:
    torch.manual_seed(0)
    model, examples = wrap(tiny_model(kind)).eval(), documents()
    with torch.no_grad():
        expected = logits_alone(model, examples)
        assert packing_decision(apply(model)).on
        row = row_of(examples)
        found = logits_of(model, row)[0, : len(expected)]
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert dict(row["segments"].builds) == {("mask", torch.device("cpu"), torch.float32, None): 1}
    for choice in ("varlen", "flex", "xformers"):
        with pytest.raises(InputError, match=f"attention {choice}: this model hands its attention a mask, but no seg"):
            apply(model, Options(attention=choice))  # type: ignore[arg-type]
    assert "sdpa" in next(d.reason for d in decisions(apply(model, Options(attention="sdpa"))) if d.name == "attention")


@pytest.mark.parametrize("kind", BY_MASK)
def test_under_autocast_the_mask_that_a_model_gets_has_its_dtype(kind: str) -> None:
    model, row = apply(tiny_model(kind)), row_of(documents())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(logits_of(model, row)).all()
    assert [key[2] for key in row["segments"].builds] == [torch.bfloat16]


def test_a_decoder_that_drops_boundaries_is_refused() -> None:
    model = model_of("llama")
    forward = model.model.forward
    model.model.forward = lambda input_ids, position_ids=None, **_: forward(input_ids, position_ids=position_ids)
    apply(model)
    assert not packing_decision(model).on
    for _ in range(2):
        with pytest.raises(InputError, match=r"can't be trained packed: boundaries reach 0 of its 2 attention modules"):
            logits_of(model, row_of(documents()))


def test_one_deaf_layer_is_enough_and_is_named() -> None:
    model = apply(model_of("llama"))
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, segments=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(InputError, match=r"1 of 2 modules read them; not layers\.1\.self_attn"):
        logits_of(model, row_of(documents()))


def test_a_model_that_swallows_segments_before_its_decoder_is_refused() -> None:
    model = model_of("llama")
    forward = model.forward
    model.forward = lambda segments=None, **inputs: forward(**inputs)
    apply(model)
    with pytest.raises(InputError, match=r"does not hand segments to its attention \(0 of 2"):
        logits_of(model, row_of(documents()))


@pytest.mark.parametrize("kind", OWN_ATTENTION)
def test_a_model_with_attention_of_its_own_is_refused_and_left_as_it_is(kind: str) -> None:
    model = tiny_model(kind, **OWN_ATTENTION[kind]).eval()
    ids = torch.arange(5, 29).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=mask).logits
        apply(model)
        assert not packing_decision(model).on
        assert not packing_of(model).on
        assert "attention" in packing_of(model).reason
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    with pytest.raises(InputError, match=r"can't be trained packed: its attention .*packing.enabled: false"):
        logits_of(model, row_of(documents()))
    with pytest.raises(InputError, match="attention sdpa: not for a model that can't be trained packed"):
        apply(model, Options(attention="sdpa"))


def test_a_bias_on_positions_is_refused_even_where_a_model_claims_to_do_without() -> None:
    model = apply(model_of("llama"))
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, position_bias=30.0, **kwargs)
    with pytest.raises(InputError, match=r"LlamaAttention asks for position_bias.*packing.enabled: false"):
        logits_of(model, row_of(documents()))


def test_attention_in_both_directions_is_refused() -> None:
    model = apply(model_of("llama"))
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(InputError, match="LlamaAttention attends in both directions"):
        logits_of(model, row_of(documents()))


def test_a_model_that_makes_its_own_mask_is_refused() -> None:
    model = apply(tiny_model("doge"))
    with pytest.raises(InputError, match=r"DogeAttention makes a mask of its own, \[1, 2, 48, 48\]"):
        logits_of(model, row_of(documents()))


@pytest.mark.parametrize("kind", HIDDEN_WINDOWS)
def test_a_window_that_attention_is_not_told_of_is_refused_where_it_matters(kind: str) -> None:
    model = apply(tiny_model(kind, **HIDDEN_WINDOWS[kind])).eval()
    with pytest.raises(InputError, match=r"limits its view by (sliding_window|attention_chunk_size) 4 without telling"):
        logits_of(model, row_of(documents()))
    short = documents((4, 3, 4, 1))
    with torch.no_grad():
        found = logits_of(model, row_of(short, 12))[0]
        expected = torch.cat([model(input_ids=torch.tensor([d["input_ids"]])).logits[0] for d in short])
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_model_with_recurrent_layers_is_refused(kind: str) -> None:
    """unsloth#7211, unsloth#7249, axolotl#3453: such layers leak state across documents."""
    model = tiny_model(kind, **RECURRENT[kind])
    decision = packing_decision(model)
    assert not decision.on
    assert re.search(r"carry state across documents \(\w+.*\); set packing.enabled: false", decision.reason)
    before = model.config._attn_implementation
    apply(model)
    assert model.config._attn_implementation == before
    with pytest.raises(InputError, match="can't be trained packed: layers that carry state across documents"):
        logits_of(model, row_of(documents()))


def test_public_names_are_the_functions() -> None:
    assert slipstream.apply is apply
    assert callable(slipstream.restore)


# What activations are chosen from


def situation_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Situation:
    seen: list[Situation] = []

    def choose(asked: Any, now: Situation) -> Any:
        seen.append(now)
        return choose_activations(asked, now)

    monkeypatch.setattr(transform, "choose_activations", choose)
    apply(model, Options(tokens=64, **options))
    (now,) = seen
    return now


def test_activations_are_chosen_for_what_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = situation_of(tiny_model(), monkeypatch, attention="sdpa").job
    assert whole is not None
    assert (whole.full, whole.rank, whole.adapted) == (True, 0, ())
    assert (whole.tokens, whole.attention, whole.weights, whole.compute) == (64, "sdpa", "float32", "float32")
    model = add_adapter(tiny_model(), AdapterOptions(rank=3, modules_to_save=["lm_head"]), seed=0)
    some = situation_of(model, monkeypatch, compute_dtype=torch.bfloat16).job
    assert some is not None
    assert (some.full, some.rank, some.compute) == (False, 3, "bfloat16")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert some.trained == trained  # the adapters by their formula, and the head


def test_a_configuration_that_can_not_be_read_keeps_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(config: Any) -> Any:
        raise InputError("model: its configuration has None for hidden_size")

    monkeypatch.setattr(transform.ModelShape, "of", unreadable)
    model = tiny_model()
    assert situation_of(model, monkeypatch).job is None
    told = {decision.name: decision for decision in decisions(model)}["recompute"]
    assert told.reason == "model: its configuration has None for hidden_size, so activations are kept"
