from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from slipstream.errors import InputError
from slipstream.model.generate import generate_text, stop_ids
from tiny import CHATML, tiny_model, tiny_tokenizer


def speaking(tokenizer: PreTrainedTokenizerFast, text: str) -> PreTrainedModel:
    """A model that says ``text``, whatever it is asked: each token of it makes the next one the likeliest."""
    model = tiny_model("llama", hidden_size=512, num_attention_heads=2, head_dim=16, vocab_size=320)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(set(ids)) == len(ids)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(320, 512))
        model.lm_head.weight.zero_()
        for token, following in pairwise(ids):
            model.lm_head.weight[following, token] = 1.0
        starts = [token for token in range(320) if token not in ids]
        model.lm_head.weight[ids[0], starts] = 1.0
    return model


def test_an_answer_stops_at_the_templates_end_of_turn() -> None:
    tokenizer = tiny_tokenizer(CHATML, eos="<|endoftext|>")  # as in base models: end of text is not end of turn
    model = speaking(tokenizer, "hey!<|im_end|>|QZ")
    assert tokenizer.eos_token_id != tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert generate_text(model, tokenizer, "?", max_tokens=30) == "hey!"
    tokenizer.chat_template = None
    assert "|QZ" in generate_text(model, tokenizer, "?", max_tokens=9)  # nothing says that it is over


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        ("{% for m in messages %}[INST]{{ m['content'] }}</s>{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", None),
    ],
)
def test_the_end_of_turn_is_read_off_the_template(template: str, end: str | None) -> None:
    tokenizer = tiny_tokenizer(template, eos="<|endoftext|>")
    expected = {"<|endoftext|>", end} - {None}
    assert stop_ids(tiny_model(), tokenizer) == {tokenizer.convert_tokens_to_ids(token) for token in expected}


def test_the_generation_configs_stops_count_too() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [7, 9]
    assert {7, 9} < stop_ids(model, tiny_tokenizer(None))


def test_the_prompt_goes_through_the_chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, model = tiny_tokenizer(CHATML), tiny_model()
    seen: list[str] = []
    plain = model.generate

    def generate(**arguments: torch.Tensor) -> torch.Tensor:
        seen.append(tokenizer.decode(arguments["input_ids"][0]))
        return plain(**arguments)

    monkeypatch.setattr(model, "generate", generate)
    generate_text(model, tokenizer, "Why?", system="Be brief.", max_tokens=1)
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert seen == [turns]


def test_max_tokens_and_the_context_bound_the_answer() -> None:
    tokenizer = tiny_tokenizer(None)
    model = speaking(tokenizer, "abcdefghij")
    assert generate_text(model, tokenizer, "!!", max_tokens=3) == "abc"
    model.config.max_position_embeddings = 7
    assert generate_text(model, tokenizer, "!!", max_tokens=30) == "abcde"
    with pytest.raises(InputError, match="prompt: 8 tokens, and the model's context has 7"):
        generate_text(model, tokenizer, "!!!!!!!!", max_tokens=3)


def test_sampling_follows_the_seed_and_leaves_generator_and_mode_alone() -> None:
    tokenizer, model = tiny_tokenizer(None), tiny_model()
    model.train()
    state = torch.get_rng_state()
    texts = [generate_text(model, tokenizer, "abc", temperature=1.0, seed=seed, max_tokens=20) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    greedy = {generate_text(model, tokenizer, "abc", seed=seed, max_tokens=20) for seed in (0, 1)}
    assert len(greedy) == 1


def test_a_system_message_needs_a_template() -> None:
    with pytest.raises(InputError, match="no chat template"):
        generate_text(tiny_model(), tiny_tokenizer(None), "abc", system="Be brief.")
