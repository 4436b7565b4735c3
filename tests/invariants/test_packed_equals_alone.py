"""A packed row teaches what its documents teach one by one: logits, loss and gradients agree."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from nested import nested_model
from packed import (
    FAMILIES,
    LENGTHS,
    TOKENS,
    WINDOW,
    assert_close_gradients,
    documents,
    gradients,
    logits_alone,
    logits_of,
    model_of,
    row_of,
    summed_loss_alone,
    with_adapter,
)
from slipstream import InputError, Options, apply
from slipstream.train.forward import BatchLoss
from slipstream.train.loss import learned_tokens, summed_cross_entropy

RELATIVE = 1e-5
WAYS = [
    (activations, adapter)
    for activations in ("keep", "recompute")
    for adapter in ("none", "before apply", "after apply")
]
EVERY_WAY = ("llama", "gemma2")
CASES = [(f, *way) for f in FAMILIES for way in (WAYS if f in EVERY_WAY else [WAYS[0], WAYS[4]])]
SHAPED = ("llama", "qwen2", "gemma2", "phi3", "smollm3", "gpt_oss", "stablelm")
"""A family for each way of attending: full, windows, both with a cap or sinks, no positions, by mask."""


def applied(family: str, options: Options, adapter: str, **overrides: Any) -> Any:
    model = model_of(family, **overrides)
    if adapter == "before apply":
        model = with_adapter(model)
    apply(model, options)
    return with_adapter(model).train() if adapter == "after apply" else model.train()


def plain(family: str, adapter: str, **overrides: Any) -> Any:
    model = model_of(family, **overrides)
    return model if adapter == "none" else with_adapter(model).train()


def assert_same_learning(ours: Any, theirs: Any, lengths: tuple[int, ...], tokens: int) -> None:
    examples = documents(lengths)
    row = row_of(examples, tokens)
    logits = logits_of(ours, row)
    used = sum(lengths)
    expected = logits_alone(theirs, examples)
    assert (logits[0, :used] - expected).norm() <= RELATIVE * expected.norm()
    learned = learned_tokens(row["labels"])
    loss = summed_cross_entropy(logits, row["labels"]) / learned.clamp(min=1)
    total, count = summed_loss_alone(theirs, examples)
    assert int(learned) == count
    reference = total / max(count, 1)
    assert abs(loss - reference) <= RELATIVE * reference
    if count:
        loss.backward()
        reference.backward()
        assert_close_gradients(gradients(ours), gradients(theirs), RELATIVE)


@pytest.mark.parametrize(("family", "activations", "adapter"), CASES)
def test_a_packed_row_equals_its_documents(family: str, activations: Any, adapter: str) -> None:
    """LlamaFactory#7318: logits, loss and gradients of a packed row are those of its documents one by one."""
    options = Options(activations=activations)
    assert sum(LENGTHS) < TOKENS
    assert 1 in LENGTHS
    assert max(LENGTHS) > WINDOW
    assert_same_learning(applied(family, options, adapter), plain(family, adapter), LENGTHS, TOKENS)


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [((48,), 48), ((40,), 48), ((20, 20, 8), 48), ((1,) * 48, 48), ((1,), 48), ((1,), 1), ((47, 1), 48), ((2, 45), 48)],
    ids=["one, full", "one", "full", "ones", "one token", "one token, full", "one at the end", "one of padding"],
)
@pytest.mark.parametrize("family", SHAPED)
def test_every_shape_of_row(family: str, lengths: tuple[int, ...], tokens: int) -> None:
    assert_same_learning(applied(family, Options(), "none"), plain(family, "none"), lengths, tokens)


@pytest.mark.parametrize("window", [1, 2, 16, 17, 18, 47, 48, 100])
def test_every_width_of_window(window: int) -> None:
    ours = applied("mistral", Options(), "none", sliding_window=window)
    assert_same_learning(ours, plain("mistral", "none", sliding_window=window), LENGTHS, TOKENS)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "stablelm"])
def test_thousands_of_one_token_documents(family: str) -> None:
    """unsloth#8957: 4,096 documents of one token in a row."""
    model = apply(model_of(family)).eval()
    examples = [{"input_ids": [3 + index % 300]} for index in range(4096)]
    with torch.no_grad():
        logits = logits_of(model, row_of(examples, 4096))[0]
        ids = torch.tensor([example["input_ids"] for example in examples])
        expected = model_of(family).eval()(input_ids=ids[:300]).logits[:, 0]
    expected = expected[torch.arange(4096) % 300]
    assert (logits - expected).norm() <= RELATIVE * expected.norm()


def test_positions_are_made_where_the_batch_brings_none() -> None:
    model = apply(model_of("llama")).eval()
    row = row_of(documents())
    with torch.no_grad():
        given = logits_of(model, row)[0, : sum(LENGTHS)]
        del row["position_ids"]
        assert torch.equal(logits_of(model, row)[0, : sum(LENGTHS)], given)
    assert [key[0] for key in row["segments"].builds].count("position_ids") == 1


def test_a_row_whose_positions_never_are_zero() -> None:
    """transformers#39814: boundaries come from lengths, so that documents may continue where others left off."""
    examples, model = documents(), apply(model_of("llama", initializer_range=0.3)).eval()
    row = row_of(examples)
    row["position_ids"] = row["position_ids"] + 100
    alone = model_of("llama", initializer_range=0.3).eval()
    with torch.no_grad():
        found = logits_of(model, row)[0, : sum(LENGTHS)]
        expected = torch.cat(
            [
                alone(input_ids=torch.tensor([ids]), position_ids=100 + torch.arange(len(ids))[None]).logits[0]
                for ids in (example["input_ids"] for example in examples)
            ]
        )
    assert (found - expected).norm() <= RELATIVE * expected.norm()


def test_embeddings_in_place_of_tokens() -> None:
    model = apply(model_of("llama")).eval()
    row = row_of(documents())
    with torch.no_grad():
        expected = logits_of(model, row)
        embeddings = model.get_input_embeddings()(row["input_ids"])
        found = model(inputs_embeds=embeddings, position_ids=row["position_ids"], segments=row["segments"]).logits
    assert torch.equal(found, expected)


def test_under_autocast_the_mask_follows_the_dtype() -> None:
    model = apply(model_of("qwen2"))
    row = row_of(documents())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = logits_of(model, row)
    with torch.no_grad():
        expected = logits_alone(model_of("qwen2"), documents())
    assert {key[2] for key in row["segments"].builds} == {torch.bfloat16}
    assert (logits[0, : sum(LENGTHS)].float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("when", ["adapter before apply", "adapter after apply", "adapter after the first step"])
def test_recomputing_draws_the_same_dropout(when: str) -> None:
    """Dropout is in the layers only through the adapter: what ``apply`` saw may have had none."""

    def step(activations: Any) -> dict[str, torch.Tensor]:
        options, row = Options(activations=activations), row_of(documents())
        model = model_of("llama")
        if when == "adapter before apply":
            model = apply(with_adapter(model, dropout=0.5), options)
        else:
            apply(model, options)
            if when == "adapter after the first step":
                summed_cross_entropy(logits_of(model, row), row["labels"]).backward()
            model = with_adapter(model, dropout=0.5)
        model.train().zero_grad()
        torch.manual_seed(7)
        summed_cross_entropy(logits_of(model, row), row["labels"]).backward()
        return {name: g for name, g in gradients(model).items() if "lora" in name}

    kept, recomputed = step("keep"), step("recompute")
    assert kept
    assert all(torch.equal(recomputed[name], kept[name]) for name in kept)


def test_recomputing_draws_the_same_attention_dropout() -> None:
    def step(activations: Any, seed: int) -> dict[str, torch.Tensor]:
        model = apply(model_of("llama", attention_dropout=0.5), Options(activations=activations))
        row = row_of(documents())
        torch.manual_seed(seed)
        summed_cross_entropy(logits_of(model, row), row["labels"]).backward()
        return gradients(model)

    kept, recomputed, other = step("keep", 7), step("recompute", 7), step("keep", 8)
    assert all(torch.equal(recomputed[name], kept[name]) for name in kept)
    assert not all(torch.equal(other[name], kept[name]) for name in kept)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_decoder_inside_a_model_of_several_parts(activations: Any) -> None:
    """Its wrapper hands it a mask for each kind of layer; none of T x T is made, and boundaries take their place."""
    assert max(LENGTHS) > WINDOW
    ours = apply(nested_model(), Options(activations=activations))
    masks: list[Any] = []
    ours.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True, prepend=True
    )
    assert_same_learning(ours, nested_model(), LENGTHS, TOKENS)
    (given,) = masks
    assert set(given) == {"sliding_attention", "full_attention"}
    assert all(mask.numel() == 1 for mask in given.values())
    row = row_of(documents())
    loss, _ = BatchLoss(ours, lambda _: nullcontext())(ours, row)  # as the trainer has it: the head in chunks
    expected, _ = summed_loss_alone(nested_model(), documents())
    assert abs(loss - expected) <= RELATIVE * expected
    with pytest.raises(InputError, match=r"attention_mask of shape \[1, 48\] beside segments"):
        ours(**row, attention_mask=torch.ones(1, TOKENS))
    with pytest.raises(InputError, match=r"attention_mask of shape {'full_attention': \[1, 1, 48, 48\], .* beside"):
        ours(**row, attention_mask={"full_attention": torch.ones(1, 1, TOKENS, TOKENS), "sliding_attention": None})
