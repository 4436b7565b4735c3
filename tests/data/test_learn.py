"""Which tokens are learned: the assistant's words and its end of turn, whatever the template."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

import chat_templates as templates
from slipstream.data.formats import Chat, Pair
from slipstream.data.learn import renderer_for
from slipstream.data.rows import DataOptions
from slipstream.data.tokens import TokenisedSet, tokenise
from slipstream.errors import InputError
from tiny import CHATML, tiny_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "the first é🙂"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "a second\n\nanswer"},
]
THOUGHT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfirst"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "<think>\nhm hm\n</think>\n\nsecond"},
]


def made(tmp_path: Path, rows: list[dict[str, Any]], tokenizer: Any, **options: Any) -> TokenisedSet:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    length = options.pop("max_length", 4096)
    return tokenise(
        str(path), DataOptions(train="", **options), tokenizer, max_length=length, cache_dir=tmp_path / "cache"
    )


def learned(documents: Any, tokenizer: Any, index: int = 0) -> list[str]:
    """The stretches of learned tokens of a document, decoded."""
    row, stretches, inside = documents[index], [], False
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (token, -100)
        if label == -100:
            inside = False
            continue
        if not inside:
            stretches.append([])
        stretches[-1].append(token)
        inside = True
    return [tokenizer.decode(stretch) for stretch in stretches]


def check(tmp_path: Path, template: str, messages: list[dict[str, Any]], expected: list[str], **options: Any) -> None:
    tokenizer = tiny_tokenizer(template, eos=options.pop("eos", "<|im_end|>"))
    result = made(tmp_path, [{"messages": messages}], tokenizer, **options)
    assert learned(result.documents, tokenizer) == expected
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert result.documents[0]["input_ids"] == tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("template", "first", "second"),
    [
        (CHATML, "the first é🙂<|im_end|>", "a second\n\nanswer<|im_end|>"),
        (templates.NO_PROMPT, "the first é🙂<|im_end|>", "a second\n\nanswer<|im_end|>"),
        (templates.LLAMA3, "the first é🙂<|eot_id|>", "a second\n\nanswer<|eot_id|>"),
        (templates.MISTRAL, " the first é🙂</s>", " a second\n\nanswer</s>"),
        (templates.MARKED, "the first é🙂<|im_end|>", "a second\n\nanswer<|im_end|>"),
        (templates.HARMONY, "the first é🙂<|end|>", "a second\n\nanswer<|return|>"),
    ],
    ids=["chatml", "no-prompt", "llama3", "mistral", "marked", "harmony"],
)
def test_assistant_turns(tmp_path: Path, template: str, first: str, second: str) -> None:
    check(tmp_path, template, TALK, [first, second])


def test_the_system_text_of_mistral_moves(tmp_path: Path) -> None:
    """Guards the case above: without the move, prefixes alone would find the turns."""
    text = tiny_tokenizer(templates.MISTRAL).apply_chat_template(TALK, tokenize=False)
    assert "[INST] Be brief.\n\nTwo?" in text
    assert "[INST] Be brief.\n\nOne?" not in text


def test_a_blank_that_no_prompt_gives_is_learned(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "x"}]
    check(tmp_path, templates.MISTRAL, talk, [" x</s>"])


def test_a_token_that_reaches_over_the_border_is_learned(tmp_path: Path) -> None:
    """The first line break is the prompt's, but shares a token with the second: better learned than never seen."""
    talk = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "\nx"}]
    check(tmp_path, CHATML, talk, ["\n\nx<|im_end|>"])


def test_thinking_is_learned_where_it_is_rendered(tmp_path: Path) -> None:
    expected = ["first<|im_end|>", "<think>\nhm hm\n</think>\n\nsecond<|im_end|>"]
    check(tmp_path, templates.QWEN3, THOUGHT, expected)


def test_a_prompt_that_opens_the_thinking_is_not_learned(tmp_path: Path) -> None:
    expected = ["first<|im_end|>", "hm hm\n</think>\n\nsecond<|im_end|>"]
    check(tmp_path, templates.THINKING_PROMPT, THOUGHT, expected)


def test_turns_after_the_last_question_keep_their_thinking(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "<think>\nlook\n</think>\n\nI look."},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]
    expected = ["<think>\nlook\n</think>\n\nI look.<|im_end|>", "<think>\n\n</think>\n\nIt rains.<|im_end|>"]
    check(tmp_path, templates.QWEN3, talk, expected)


def test_tool_calls_are_learned(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": "Rome"}'}}
    talk = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]
    tokenizer = tiny_tokenizer(templates.LLAMA3)
    result = made(tmp_path, [{"messages": talk}], tokenizer)
    assert learned(result.documents, tokenizer) == [
        '{"name": "look", "arguments": {"at": "Rome"}}<|eot_id|>',
        "It rains.<|eot_id|>",
    ]


@pytest.mark.parametrize("learn", ["auto", "all", "completion"])
def test_a_template_that_leaves_out_tools_is_told(tmp_path: Path, learn: str) -> None:
    """Rendered without its call, the turn would teach silence."""
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    talk = [TALK[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(InputError, match="row 1: the chat template leaves out tool_calls"):
        made(tmp_path, [{"messages": talk}], tiny_tokenizer(), learn=learn)
    with pytest.raises(InputError, match="row 1: the chat template leaves out tools"):
        made(tmp_path, [{"messages": TALK, "tools": [call]}], tiny_tokenizer(), learn=learn)


@pytest.mark.parametrize("template", [CHATML, templates.MARKED, templates.QWEN3])
def test_completion_of_a_conversation_is_its_last_turn(tmp_path: Path, template: str) -> None:
    prefix = "<think>\n\n</think>\n\n" if template == templates.QWEN3 else ""
    check(tmp_path, template, TALK, [f"{prefix}a second\n\nanswer<|im_end|>"], learn="completion")


def test_all_is_everything_but_the_first_token(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    result = made(tmp_path, [{"messages": TALK}], tokenizer, learn="all")
    row = result.documents[0]
    assert row["labels"] == [-100, *row["input_ids"][1:]]


@pytest.mark.parametrize(
    ("template", "why"),
    [(templates.ENDS_ONCE, "ends otherwise"), (templates.UPSIDE_DOWN, "cannot be told")],
    ids=["ends-once", "upside-down"],
)
def test_a_template_that_hides_its_turns_is_refused(tmp_path: Path, template: str, why: str) -> None:
    with pytest.raises(InputError, match=rf"row 1: .*{why}.*generation.*learn"):
        made(tmp_path, [{"messages": TALK}], tiny_tokenizer(template), bad_rows="skip")


def test_what_is_refused_in_the_middle_is_learned_at_the_end(tmp_path: Path) -> None:
    check(tmp_path, templates.ENDS_ONCE, TALK, ["a second\n\nanswer</s>"], learn="completion")


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("end", ["\n", " "])
def test_white_space_that_ends_a_turn_is_learned(tmp_path: Path, trim: bool, end: str) -> None:
    lines = "{% for m in messages %}{{ m.role }}>{{ m.content }}" + end + "{% endfor %}"
    lines += "{% if add_generation_prompt %}assistant>{% endif %}"
    tokenizer = tiny_tokenizer(lines)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim, add_prefix_space=False)
    result = made(tmp_path, [{"messages": TALK[3:]}], tokenizer)
    assert learned(result.documents, tokenizer) == ["a second\n\nanswer" + end]


def test_turns_that_end_by_what_they_say(tmp_path: Path) -> None:
    """A turn with a call ends otherwise than one of words, so a probe of words doesn't find its end; prefixes do."""
    template = templates.LLAMA3.replace("endfor %}\n        {{- '<|eot_id|>'", "endfor %}\n        {{- '<|end|>'")
    assert template != templates.LLAMA3
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    talk = [TALK[1], {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "rain"}]
    check(tmp_path, template, talk, ['{"name": "look", "arguments": {}}<|end|>'])


@pytest.mark.parametrize("trim", [False, True])
def test_white_space_tokens(tmp_path: Path, trim: bool) -> None:
    """Tokens of white space at both ends of a turn, for tokenizers that trim it from offsets too."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim, add_prefix_space=False)
    talk = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "x\n\n \t"}]
    result = made(tmp_path, [{"messages": talk}], tokenizer)
    assert learned(result.documents, tokenizer) == ["x\n\n \t<|im_end|>"]


class WithoutOffsets:
    """A tokenizer that gives no offsets, like the slow ones."""

    is_fast = False

    def __init__(self, fast: Any) -> None:
        self._fast = fast
        self.init_kwargs: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        assert not options.pop("return_offsets_mapping", False), "it has none"
        return self._fast(*texts, **options)


@pytest.mark.parametrize("template", [CHATML, templates.MARKED])
def test_a_tokenizer_without_offsets_is_exact(tmp_path: Path, template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    fast = made(tmp_path, [{"messages": TALK}], tokenizer)
    slow = made(tmp_path, [{"messages": TALK}], WithoutOffsets(tokenizer))
    assert len(list((tmp_path / "cache").iterdir())) == 2, "they don't share a cache entry"
    assert slow.documents[0] == fast.documents[0]


def test_a_tokenizer_without_offsets_is_refused_where_tokens_reach_over(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "\nx"}]
    with pytest.raises(InputError, match=r"offsets.*tokenizer\.json"):
        made(tmp_path, [{"messages": talk}], WithoutOffsets(tiny_tokenizer()))


def test_pairs_through_the_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    result = made(tmp_path, [{"prompt": "One?", "completion": "first"}], tokenizer)
    assert learned(result.documents, tokenizer) == ["first<|im_end|>"]
    assert tokenizer.decode(result.documents[0]["input_ids"]).startswith("<|im_start|>user\nOne?<|im_end|>\n")


def test_a_completion_of_several_messages_is_learned_whole(tmp_path: Path) -> None:
    answer = [
        {"role": "assistant", "content": "I look."},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]
    row = {"prompt": [{"role": "user", "content": "Weather?"}], "completion": answer}
    tokenizer = tiny_tokenizer()
    whole = "I look.<|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\nIt rains.<|im_end|>"
    assert learned(made(tmp_path, [row], tokenizer).documents, tokenizer) == [whole]
    turns = ["I look.<|im_end|>", "It rains.<|im_end|>"]
    assert learned(made(tmp_path, [row], tokenizer, learn="assistant").documents, tokenizer) == turns


@pytest.mark.parametrize("template", [None, CHATML])
def test_plain_pairs(tmp_path: Path, template: str | None) -> None:
    tokenizer = tiny_tokenizer(template, eos="</s>", bos="<s>")
    options = {"chat_template": "none"} if template else {}
    result = made(tmp_path, [{"prompt": "One?", "completion": " first"}], tokenizer, **options)
    assert tokenizer.decode(result.documents[0]["input_ids"]) == "<s>One? first</s>"
    assert learned(result.documents, tokenizer) == [" first</s>"]


def test_text_has_one_begin_and_one_end(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(eos="</s>", bos="<s>")
    result = made(tmp_path, [{"text": "abc"}, {"text": "<s>abc</s>"}], tokenizer)
    assert [tokenizer.decode(row["input_ids"]) for row in result.documents] == ["<s>abc</s>"] * 2
    assert learned(result.documents, tokenizer) == ["abc</s>"]


def test_a_template_with_begin_of_text_doesnt_get_a_second(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(templates.LLAMA3, bos="<s>")
    row = made(tmp_path, [{"messages": TALK}], tokenizer).documents[0]
    assert row["input_ids"].count(tokenizer.bos_token_id) == 1
    assert row["input_ids"][0] == tokenizer.bos_token_id


def test_a_template_of_the_recipe_wins(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(templates.LLAMA3, encoding="utf-8")
    tokenizer = tiny_tokenizer()
    for given in (str(file), templates.LLAMA3):
        result = made(tmp_path, [{"messages": TALK[1:3]}], tokenizer, chat_template=given)
        assert learned(result.documents, tokenizer) == ["the first é🙂<|eot_id|>"]


@pytest.mark.parametrize(
    ("row", "template", "options", "message"),
    [
        ({"text": "a"}, CHATML, {"learn": "assistant"}, "no sense for plain text"),
        ({"text": "a"}, CHATML, {"learn": "completion"}, "no sense for plain text"),
        ({"prompt": "a", "completion": "b"}, None, {"learn": "assistant"}, "assistant needs a chat template"),
        ({"messages": TALK}, None, {}, "the tokenizer has none; set data.chat_template"),
        ({"messages": TALK}, CHATML, {"chat_template": "none"}, "none renders pairs only"),
        ({"messages": TALK}, CHATML, {"chat_template": "no/such.jinja"}, "neither Jinja nor a file"),
        ({"messages": TALK}, CHATML, {"chat_template": "{% for %}"}, "not valid Jinja"),
        ({"prompt": TALK[:2], "completion": TALK[2:3]}, None, {}, "set data.chat_template"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, row: dict[str, Any], template: str | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        made(tmp_path, [row], tiny_tokenizer(template), **options)


def test_the_template_for_tools_is_used_for_tools() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ tools | tojson }}" + CHATML}
    renderer = renderer_for(tokenizer, "messages", None, "auto")
    talk = tuple(TALK[1:3])
    assert renderer.render(Chat(talk, ({"name": "look"},))).text.startswith('[{"name"')
    assert renderer.render(Chat(talk)).text.startswith("<|im_start|>")
    assert renderer.render(Pair(talk[:1], talk[1:], None)).spans is not None
