"""New tokens: room for them, their rows alone trained, kept by plain peft, and merged."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from packed import assert_close_gradients, gradients
from slipstream.errors import InputError
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.model.merge import merge_adapter
from slipstream.model.new_tokens import check_named, fit_vocabulary, new_token_ids, trainable_rows
from tiny import tiny_model, tiny_tokenizer

VOCABULARY = 277
"""Two more than the tokenizer's own tokens, as in checkpoints whose matrices have spare rows."""
ADDED = ["<think>", "</think>", "<tool>", "</tool>"]
IDS = [275, 276, 277, 278]
pytestmark = pytest.mark.filterwarnings("ignore")


def tokenizer_with(tokens: list[str]) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(tokens)
    return tokenizer


def base_model(kind: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    torch.manual_seed(seed)
    return tiny_model(kind, vocab_size=VOCABULARY, **overrides)


def fitted(**overrides: Any) -> tuple[Any, list[int]]:
    model, tokenizer = base_model(**overrides), tokenizer_with(ADDED)
    ids = new_token_ids(model, tokenizer, ADDED)
    fit_vocabulary(model, tokenizer)
    return model, ids


def adapted(**overrides: Any) -> Any:
    model, ids = fitted(**overrides)
    return add_adapter(model, AdapterOptions(rank=2), seed=0, new_tokens=ids).train()


def logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.tensor([[3, 277, 5, 275, 278, 276, 9, 278]])).logits


def trained(model: Any) -> Any:
    """After two steps along the gradient."""
    for _ in range(2):
        model.zero_grad()
        logits(model).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter -= 0.1 * parameter.grad / (parameter.grad.norm() + 1e-9)
    return model.eval()


def test_the_matrices_grow_and_new_rows_begin_as_the_mean() -> None:
    model, ids = fitted()
    before = base_model()
    assert ids == IDS  # two of them in rows that were there
    for new, old in zip(
        (model.get_input_embeddings(), model.get_output_embeddings()),
        (before.get_input_embeddings(), before.get_output_embeddings()),
        strict=True,
    ):
        assert new.weight.shape[0] == 280
        assert torch.equal(new.weight[:VOCABULARY], old.weight)
        torch.testing.assert_close(new.weight[VOCABULARY:], old.weight.mean(0).expand(3, -1))
    assert model.config.vocab_size == 280


def test_ids_that_a_tokenizer_leaves_out_need_rows_too() -> None:
    model, tokenizer = base_model(), tiny_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["model"]["vocab"]["the"] = 300  # of 275 tokens
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)))
    assert max(tokenizer.get_vocab().values()) == 300 > len(tokenizer)
    assert new_token_ids(model, tokenizer, []) == [300]
    fit_vocabulary(model, tokenizer)
    assert model.get_input_embeddings().weight.shape[0] == 304


def test_rows_are_never_taken_away() -> None:
    model, tokenizer = tiny_model(), tokenizer_with(ADDED)
    assert model.config.vocab_size > len(tokenizer)
    before = model.get_input_embeddings().weight
    fit_vocabulary(model, tokenizer)
    assert model.get_input_embeddings().weight is before


def test_what_is_wrong_with_named_tokens_is_told_with_value_and_place() -> None:
    with pytest.raises(InputError) as caught:
        check_named(["<a>", " \t", "<b>", "<a>", "", "<a>"])
    assert str(caught.value) == (
        "load.new_tokens: item 2 of 6 is ' \\t', nothing but blanks; name tokens such as <think>; "
        "item 5 of 6 is '', nothing but blanks; name tokens such as <think>; "
        "'<a>' is named 3 times (items 1, 4 and 6); name it once"
    )
    check_named(ADDED)


def test_tokens_without_a_row_are_new_though_nobody_named_them() -> None:
    model = base_model()
    assert new_token_ids(model, tiny_tokenizer(), []) == []
    assert new_token_ids(model, tokenizer_with(ADDED), []) == [277, 278]
    there = tiny_tokenizer().convert_tokens_to_ids("<|im_start|>")
    assert new_token_ids(model, tiny_tokenizer(), ["<|im_start|>"]) == [there]  # to be learned by this model


def test_a_matrix_that_is_trained_whole_has_no_rows_of_its_own() -> None:
    model, ids = fitted()
    assert trainable_rows(model, ids, []) == {"model.embed_tokens": ids, "lm_head": ids}
    assert trainable_rows(model, ids, ["embed_tokens"]) == {"lm_head": ids}
    assert trainable_rows(model, ids, ["embed_tokens", "lm_head"]) is None
    assert trainable_rows(model, [], []) is None
    tied, _ = fitted(tie_word_embeddings=True)
    assert trainable_rows(tied, ids, []) == {"model.embed_tokens": ids}


CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "scaled": {"kind": "gemma3_text", "tie_word_embeddings": True, "layer_types": ["full_attention"] * 2},
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_pefts_own_layer_does(case: str) -> None:
    ours = trained(adapted(**CASES[case])).train()
    theirs = copy.deepcopy(ours)
    replaced = 0
    for module in theirs.modules():
        replaced += vars(module).pop("forward", None) is not None
    assert replaced == 2
    made = []
    for model in (ours, theirs):
        model.zero_grad()
        out = logits(model)
        out.square().sum().backward()
        made.append((out.detach(), gradients(model)))
    torch.testing.assert_close(made[0][0], made[1][0], rtol=1e-5, atol=1e-5)
    assert_close_gradients(made[0][1], made[1][1], 1e-4)
    assert any("trainable_tokens_delta" in name for name in made[0][1])


@pytest.mark.parametrize("case", CASES)
def test_only_the_new_rows_are_trained(case: str) -> None:
    model = adapted(**CASES[case])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = trained(model).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert all("lora_" in name or "trainable_tokens_delta" in name for name in changed)
    rows = {after[name].data_ptr() for name in changed if "trainable_tokens_delta" in name}
    assert len(rows) == (2 if case == "untied" else 1)


@pytest.mark.parametrize("case", CASES)
def test_plain_peft_loads_it_and_it_merges(case: str, tmp_path: Path) -> None:
    model = trained(adapted(**CASES[case]))
    expected = logits(model).detach()
    model.save_pretrained(tmp_path / "adapter")
    base = base_model(**CASES[case])
    base.resize_token_embeddings(280)  # as anybody would: new rows are random, and the adapter has their values
    unlearned = logits(copy.deepcopy(base)).detach()
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(loaded).detach(), expected, rtol=1e-4, atol=1e-5)
    assert (unlearned - expected).abs().max() > 1e-2
    count = sum(parameter.numel() for parameter in base.parameters())
    merged = merge_adapter(base, tmp_path / "adapter", dtype="float32", base_parameters=count)
    merged.save_pretrained(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(plain).detach(), expected, rtol=1e-4, atol=1e-5)
