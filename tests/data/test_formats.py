"""The five formats, as they are found in the field, brought to one form."""

from typing import Any

import pytest

from slipstream.data.formats import Chat, Pair, Text, normalise, recognise
from slipstream.data.rows import DataOptions, RawRow, RowError
from slipstream.errors import InputError

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
PAIR = Pair((USER,), (ASSISTANT,), ("q", "a"))


def raw(fields: dict[str, Any] | None, fault: str = "") -> RawRow:
    return RawRow(17, None, fields, fault)


def normal(row: dict[str, Any], **options: Any) -> Text | Pair | Chat:
    chosen = DataOptions(train="", **options)
    return normalise(raw(row), recognise(raw(row), chosen), chosen.fields)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "t", "id": 1}, Text("t")),
        ({"prompt": "q", "completion": "a"}, PAIR),
        ({"prompt": [USER], "completion": [ASSISTANT]}, Pair((USER,), (ASSISTANT,), None)),
        ({"instruction": "q", "input": "", "output": "a", "text": "t"}, Pair((USER,), (ASSISTANT,), ("q\n\n", "a"))),
        ({"messages": [USER, ASSISTANT], "text": "t"}, Chat((USER, ASSISTANT))),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, Chat((USER, ASSISTANT))),
        ({"conversations": [USER, ASSISTANT]}, Chat((USER, ASSISTANT))),
        ({"messages": '[{"role": "user", "content": "q"}]'}, Chat((USER,))),
        ({"prompt": '[{"x": 1}]', "completion": "[]"}, None),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "2"}]}]},
            None,
        ),
    ],
)
def test_auto(row: dict[str, Any], expected: Text | Pair | Chat | None) -> None:
    found = normal(row)
    if expected is not None:
        assert found == expected
    elif isinstance(found, Pair):
        assert found.plain == ('[{"x": 1}]', "[]"), "text that happens to be JSON stays text"
    else:
        assert isinstance(found, Chat)
        assert found.messages[0]["content"] == "q2"


def test_instruction_with_input_and_system() -> None:
    found = normal({"instruction": "do", "input": "this", "output": "a", "system": "be"})
    assert found == Pair(
        ({"role": "system", "content": "be"}, {"role": "user", "content": "do\n\nthis"}),
        (ASSISTANT,),
        ("be\n\ndo\n\nthis\n\n", "a"),
    )


def test_every_speaker_of_conversations() -> None:
    names = ["system", "human", "function_call", "observation", "gpt", "user", "tool", "function", "assistant"]
    call = '{"name": "look", "arguments": {"at": "Rome"}}'
    turns = [{"from": name, "value": call if name == "function_call" else name} for name in names]
    found = normal({"conversations": turns, "tools": '[{"name": "look"}]'})
    assert isinstance(found, Chat)
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "tool", "tool", "assistant"]
    assert [message["role"] for message in found.messages] == roles
    function = {"name": "look", "arguments": {"at": "Rome"}}
    assert found.messages[2]["tool_calls"] == [{"type": "function", "function": function}]
    assert found.tools == ({"name": "look"},)


def test_a_system_column_becomes_a_message() -> None:
    found = normal({"conversations": [{"from": "human", "value": "q"}], "system": "be"})
    assert found == Chat(({"role": "system", "content": "be"}, USER))


def test_tool_arguments_as_json_text_become_objects() -> None:
    call = {"id": "1", "function": {"name": "look", "arguments": '{"at": null}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "name": None}
    found = normal({"messages": [USER, message]})
    assert isinstance(found, Chat)
    function = {"name": "look", "arguments": {"at": None}}
    expected = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}
    assert found.messages[1] == {**expected, "reasoning_content": "hm"}, "other keys stay, empty ones go"


@pytest.mark.parametrize(
    ("fields", "row", "expected"),
    [
        ({"prompt": "question", "completion": "answer"}, {"question": "q", "answer": "a", "text": "t"}, PAIR),
        ({"completion": "answer"}, {"prompt": "q", "answer": "a", "messages": []}, PAIR),
        ({"text": "body"}, {"body": "t"}, Text("t")),
        ({"messages": "talk", "role": "who"}, {"talk": [{"who": "user", "content": "q"}]}, Chat((USER,))),
        ({"value": "says"}, {"conversations": [{"from": "human", "says": "q"}]}, Chat((USER,))),
    ],
)
def test_field_maps(fields: dict[str, str], row: dict[str, Any], expected: Text | Pair | Chat) -> None:
    assert normal(row, fields=fields) == expected


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"body": "t", "id": 1}, {}, r"row 17 fits no format: its fields are body, id; name them in data\.fields"),
        ({"prompt": "q"}, {"fields": {"promt": "prompt"}}, "maps 'promt', which no format has; known: .*prompt"),
        ({"prompt": "q"}, {"fields": {"prompt": "a", "text": "b"}}, "mixes the formats prompt-completion and text"),
    ],
)
def test_sets_that_cannot_be_recognised(row: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        normal(row, **options)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("text", {"body": "t"}, r"lacks text \(format text; its fields are body\); set data.fields or data.format"),
        ("text", {"text": " \n"}, "text is empty"),
        ("text", {"text": None}, "text is empty"),
        ("text", {"text": 5}, "text is a int"),
        ("prompt-completion", {"prompt": "q", "completion": ""}, "completion is empty"),
        ("prompt-completion", {"prompt": [USER], "completion": "a"}, "both be text or both be lists"),
        ("prompt-completion", {"prompt": [USER], "completion": [USER]}, "ends with a message of user"),
        ("instruction", {"instruction": "", "output": "a"}, "instruction is empty"),
        ("messages", {"messages": []}, "messages is empty"),
        ("messages", {"messages": "hello"}, "messages is a str"),
        ("messages", {"messages": ["hello"]}, "message 1 of messages is a str"),
        ("messages", {"messages": [USER, {"content": "q"}]}, "message 2 of messages has no role or from"),
        ("messages", {"messages": [{"role": "user"}]}, "message 1 of messages has no content"),
        ("messages", {"messages": [{"role": "bot", "content": "q"}]}, "is by 'bot'; use the roles human/user"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "part of type image"),
        ("messages", {"messages": [{"role": "user", "content": 5}]}, "content of message 1 of messages is a int"),
        ("messages", {"messages": [USER], "tools": "look"}, "tools is a str"),
        ("messages", {"messages": [{**ASSISTANT, "tool_calls": "look"}]}, "tool_calls of message 1"),
        (
            "conversations",
            {"conversations": [{"from": "function_call", "value": "{"}]},
            "function_call that isn't JSON",
        ),
        ("conversations", {"conversations": [{"from": "function_call", "value": "{}"}]}, "without a name"),
    ],
)
def test_rows_that_cannot_be_used(name: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        normalise(raw(row), name, {})


def test_unreadable_rows_keep_their_reason() -> None:
    with pytest.raises(RowError, match="line 17 is not JSON"):
        normalise(raw(None, "line 17 is not JSON"), "text", {})
