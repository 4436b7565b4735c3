"""The five shapes of a row, brought to three: text, a pair (prompt, completion), a conversation.

Everything after this file sees only `Text`, `Pair` and `Chat`; what other tools call things (`from`/`value`, `gpt`,
typed content parts, tool arguments as JSON text) ends here. Messages stay plain dictionaries, since chat templates read
whatever keys a model's authors agreed on (`reasoning_content`, `tool_call_id`); only what they all share is checked.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.data.rows import DataOptions, RawRow, RowError
from slipstream.errors import InputError

Message = dict[str, Any]
"""``role`` and ``content`` (text; may be missing beside ``tool_calls``), and what else the template reads."""

_NEEDED = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
"""Format -> the fields it cannot do without, in the order in which ``auto`` tries them (a set with messages or pairs
often has a rendered ``text`` beside them)."""

_TELLING = {
    "messages": "messages",
    "role": "messages",
    "content": "messages",
    "conversations": "conversations",
    "from": "conversations",
    "value": "conversations",
    "prompt": "prompt-completion",
    "completion": "prompt-completion",
    "instruction": "instruction",
    "input": "instruction",
    "output": "instruction",
    "text": "text",
}
"""Field -> the format that a mapping of it tells of."""
_OPTIONAL = ("system", "tools")

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}
"""What data sets call the speakers -> what chat templates call them."""


@dataclass(frozen=True)
class Text:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class Pair:
    """A prompt and its completion, as messages; plain strings become one user and one assistant message."""

    prompt: tuple[Message, ...]
    completion: tuple[Message, ...]
    plain: tuple[str, str] | None
    """The pair as text for tokenizers without chat template; none where the data gives messages."""


@dataclass(frozen=True)
class Chat:
    """A conversation, with the tools on offer."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None


Row = Text | Pair | Chat


def recognise(row: RawRow, options: DataOptions) -> str:
    """The format of the set: as the options say, else told by the field mapping, else by the fields of ``row``.

    Raises `InputError` where a mapping names no known field, or the row fits no format.
    """
    told = _told(options.fields)
    if options.format != "auto":
        return options.format
    if told is not None:
        return told
    fields = row.fields or {}
    for name, needed in _NEEDED.items():
        if all(field in fields for field in needed):
            return name
    raise InputError(
        f"{row.place} fits no format: its fields are {_listed(fields)}; name them in data.fields, "
        "e.g. {prompt: question, completion: answer}, or rename them to messages, conversations, prompt/completion, "
        "instruction/input/output or text"
    )


def normalise(row: RawRow, name: str, fields: Mapping[str, str]) -> Row:
    """The row in its internal form. Raises `RowError` with the reason where it cannot be used."""
    if row.fields is None:
        raise RowError(row.fault)
    raw = row.fields
    missing = [field for field in _NEEDED[name] if fields.get(field, field) not in raw]
    if missing:
        wanted = " and ".join(fields.get(field, field) for field in missing)
        raise RowError(
            f"lacks {wanted} (format {name}; its fields are {_listed(raw)})", "set data.fields or data.format"
        )
    values = {field: raw.get(fields.get(field, field)) for field in (*_TELLING, *_OPTIONAL)}
    if name == "text":
        return Text(_filled(values["text"], "text"))
    if name == "prompt-completion":
        return _pair(values["prompt"], values["completion"], fields)
    if name == "instruction":
        return _instruction(values)
    return _chat(values[name], values, name, fields)


def _told(fields: Mapping[str, str]) -> str | None:
    known = (*_TELLING, *_OPTIONAL)
    unknown = [field for field in fields if field not in known]
    if unknown:
        raise InputError(f"data.fields maps {unknown[0]!r}, which no format has; known: {', '.join(known)}")
    formats = sorted({_TELLING[field] for field in fields if field in _TELLING})
    if len(formats) > 1:
        raise InputError(f"data.fields mixes the formats {' and '.join(formats)}; map the fields of one")
    return formats[0] if formats else None


def _listed(raw: Mapping[str, Any]) -> str:
    return ", ".join(map(str, raw)) or "none"


def _string(value: object, what: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowError(f"{what} is a {type(value).__name__}, not text")
    return value


def _filled(value: object, what: str) -> str:
    text = _string(value, what)
    if not text.strip():
        raise RowError(f"{what} is empty")
    return text


def _pair(prompt: object, completion: object, fields: Mapping[str, str]) -> Pair:
    prompt, completion = _if_messages(prompt), _if_messages(completion)
    if isinstance(prompt, list) != isinstance(completion, list):
        raise RowError("prompt and completion must both be text or both be lists of messages")
    if isinstance(prompt, list):
        answer = _messages(completion, "completion", fields)
        if answer[-1]["role"] != "assistant":
            raise RowError(f"the completion ends with a message of {answer[-1]['role']}, not of the assistant")
        return Pair(_messages(prompt, "prompt", fields), answer, None)
    question, reply = _string(prompt, "prompt"), _filled(completion, "completion")
    return _plain_pair(question, reply, question)


def _plain_pair(prompt: str, completion: str, plain_prompt: str, system: str = "") -> Pair:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    lead = f"{system}\n\n" if system else ""
    return Pair(tuple(messages), ({"role": "assistant", "content": completion},), (lead + plain_prompt, completion))


def _instruction(values: Mapping[str, Any]) -> Pair:
    """Instruction and input are one user message; as plain text, a blank line stands before the output."""
    instruction, given = _filled(values["instruction"], "instruction"), _string(values["input"], "input")
    prompt = f"{instruction}\n\n{given}" if given.strip() else instruction
    return _plain_pair(
        prompt, _filled(values["output"], "output"), f"{prompt}\n\n", _string(values["system"], "system")
    )


def _chat(value: object, values: Mapping[str, Any], name: str, fields: Mapping[str, str]) -> Chat:
    messages = _messages(_structured(value), name, fields)
    system = _string(values["system"], "system")
    if system.strip() and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system}, *messages)
    tools = _structured(values["tools"])
    if tools in (None, "", []):
        return Chat(messages)
    if not isinstance(tools, list):
        raise RowError(f"tools is a {type(tools).__name__}, not a list")
    return Chat(messages, tuple(tools))


def _structured(value: object) -> object:
    """Lists kept as JSON text (CSV and some Parquet sets) parsed; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        if isinstance(parsed, list) and parsed and all(isinstance(item, dict) for item in parsed):
            return parsed
        return [] if parsed == [] else value
    return value


def _if_messages(value: object) -> object:
    """A list of messages kept as JSON text parsed; other text stays, be it JSON: it may be what is to be learned."""
    parsed = _structured(value)
    is_chat = isinstance(parsed, list) and parsed and all(isinstance(item, dict) and "role" in item for item in parsed)
    return parsed if is_chat else value


def _messages(value: object, what: str, fields: Mapping[str, str]) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise RowError(f"{what} is a {type(value).__name__}, not a list of messages")
    if not value:
        raise RowError(f"{what} is empty")
    return tuple(_message(item, f"message {i} of {what}", fields) for i, item in enumerate(value, start=1))


def _message(item: object, what: str, fields: Mapping[str, str]) -> Message:
    if not isinstance(item, dict):
        raise RowError(f"{what} is a {type(item).__name__}, not an object")
    role_key = _present(item, (fields.get("role", "role"), fields.get("from", "from")), what)
    content_key = fields.get("content", "content") if role_key == fields.get("role", "role") else None
    if content_key not in item:
        content_key = fields.get("value", "value")
    role = _ROLES.get(str(item[role_key]))
    if role is None:
        raise RowError(f"{what} is by {item[role_key]!r}", f"use the roles {'/'.join(_ROLES)}")
    rest = {key: value for key, value in item.items() if key not in (role_key, content_key) and value is not None}
    content = _content(item.get(content_key), what)
    if role == "function_call":
        return {"role": "assistant", **rest, "content": "", "tool_calls": _called(content or "", what)}
    if "tool_calls" in rest:
        rest["tool_calls"] = _tool_calls(rest["tool_calls"], what)
    if content is None and not rest.get("tool_calls"):
        raise RowError(f"{what} has no {fields.get('content', 'content')}")
    return {"role": role, "content": "" if content is None else content, **rest}


def _present(item: Mapping[str, Any], keys: tuple[str, ...], what: str) -> str:
    for key in keys:
        if key in item:
            return key
    raise RowError(f"{what} has no {' or '.join(keys)} (its fields are {_listed(item)})")


def _content(value: object, what: str) -> str | None:
    """Text, or the text of typed parts joined."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RowError(f"the content of {what} is a {type(value).__name__}, not text")
    parts = []
    for part in value:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RowError(f"the content of {what} has a part of type {kind}; only text can be learned")
        parts.append(part["text"])
    return "".join(parts)


def _tool_calls(value: object, what: str) -> list[Any]:
    """Calls with their arguments as objects: templates print them as JSON, so JSON text would be quoted twice."""
    calls = _structured(value)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowError(f"the tool_calls of {what} are not a list of objects")
    made = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict):
            made.append({**call, "function": _with_arguments(function)})
        else:
            made.append(_with_arguments(call))
    return made


def _with_arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return function
    return {**function, "arguments": parsed} if isinstance(parsed, dict) else function


def _called(text: str, what: str) -> list[Any]:
    """The tool calls of a ``function_call`` turn: a JSON object, or a list of them."""
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise RowError(f"{what} is a function_call that isn't JSON ({error})") from error
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise RowError(f"{what} is a function_call without a name")
    return [{"type": "function", "function": _with_arguments(call)} for call in calls]
