"""Rows to rendered text, and which of its characters are learned.

The loss must fall on the assistant's words and its end-of-turn token, nowhere else; a template only gives text. Where
it carries ``{% generation %}`` marks, transformers says which characters they cover. Few do, so turns are otherwise
located in the rendering of the whole conversation, by two exact ways:

1. prefixes. With R(m) the rendering of messages m, and R?(m) the same with the prompt to generate:
       R?(before the turn)  is a prefix of  R(up to the turn)  is a prefix of  R(all):   what lies between is the turn
2. a probe, for templates that render a turn differently once another follows (thinking left out of earlier turns,
   the system text moved to the last one): the conversation rendered with the turn's words replaced by a unique word.
       R(all) = <before the probe> the turn <after the probe>, wherever both sides agree

Where neither holds, the row is refused with the reason. Tokenising pieces and joining them would be simpler, but gives
other tokens than the model sees at inference; replacing the tokenizer's template by a marked one of ours would tie us
to each model's spelling.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from slipstream.data.formats import Chat, Message, Pair, Row, Text
from slipstream.data.rows import RowError
from slipstream.errors import InputError

Span = tuple[int, int]
"""Characters [start, end) of a rendering."""
Learn = Literal["all", "completion", "assistant"]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What a template raises on a conversation it wasn't written for (a role it doesn't know, a missing key)."""
_REMEDY = "set data.chat_template to a template with {% generation %} marks, or data.learn: all"


@dataclass(frozen=True)
class Rendered:
    """A document as text."""

    text: str
    spans: tuple[Span, ...] | None
    """What is learned of it, ascending; none where all of it is."""


@dataclass(frozen=True)
class Renderer:
    """Renders the rows of one set with one tokenizer, and locates what is learned."""

    tokenizer: Any
    template: str | None
    """The chat template; none renders pairs as plain text."""
    learn: Learn
    tool_template: str | None = None
    """The template for conversations with tools, where the tokenizer has one apart."""

    @property
    def plain(self) -> bool:
        """Whether text is rendered without a template: the tokenizer adds its special tokens, we add the end."""
        return self.template is None

    def render(self, row: Row) -> Rendered:
        """The row's text and what is learned of it. Raises `RowError` for the row, `InputError` for the template."""
        if isinstance(row, Text):
            return Rendered(row.text, None)
        if isinstance(row, Pair):
            return self._plain_pair(row) if self.plain else self._pair(row)
        return self._chat(row)

    def _plain_pair(self, row: Pair) -> Rendered:
        if row.plain is None:
            raise InputError("prompts are lists of messages, but there is no chat template; set data.chat_template")
        prompt, completion = row.plain
        text = prompt + completion
        return Rendered(text, None if self.learn == "all" else ((len(prompt), len(text)),))

    def _pair(self, row: Pair) -> Rendered:
        if any(part["role"] != "assistant" for part in (row.completion[0], row.completion[-1])):
            raise RowError("the completion must begin and end with a message of the assistant")
        chat = Chat((*row.prompt, *row.completion))
        if self.learn != "completion":
            return self._chat(chat)
        self._check_tools(chat)
        full = self.text(chat.messages, None)
        first, last = len(row.prompt), len(chat.messages) - 1
        turns = Turns(self, chat, full)
        return Rendered(full, ((turns.span(first)[0], turns.span(last)[1]),))

    def _chat(self, chat: Chat) -> Rendered:
        self._check_tools(chat)
        if self.learn == "all":
            return Rendered(self.text(chat.messages, chat.tools), None)
        spoken = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if not spoken:
            raise RowError("nothing to learn: no turn of the assistant")
        full = self.text(chat.messages, chat.tools)
        if self.learn == "assistant" and self.marks:
            return Rendered(full, self._marked(chat, full))
        turns = Turns(self, chat, full)
        wanted = spoken if self.learn == "assistant" else spoken[-1:]
        return Rendered(full, tuple(turns.span(i) for i in wanted))

    def _marked(self, chat: Chat, full: str) -> tuple[Span, ...]:
        """What the template marks, with the end-of-text token where it follows at once.

        transformers makes a token mask of the marks itself, but in some versions it stops short at characters of
        several tokens; the characters are right in all.
        """
        texts, marks = render_jinja_template(
            conversations=[list(chat.messages)],
            tools=list(chat.tools) if chat.tools else None,
            chat_template=self._template(chat.tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        assert texts == [full], "the marks are of the same text"
        end = self.tokenizer.eos_token or ""
        spans = [(a, b + len(end) if full.startswith(end, b) else b) for a, b in marks[0] if a < b]
        if not spans:
            raise RowError("nothing to learn: the template marks nothing as generated")
        return tuple(spans)

    def _template(self, tools: Sequence[Any] | None) -> str | None:
        return (self.tool_template or self.template) if tools else self.template

    def _check_tools(self, chat: Chat) -> None:
        """A template that doesn't mention tools leaves them out without a word, and silence would be learned."""
        template = self._template(chat.tools)
        assert template is not None
        used = [("tools", bool(chat.tools)), ("tool_calls", any("tool_calls" in message for message in chat.messages))]
        for name, given in used:
            if given and name not in template:
                raise RowError(
                    f"the chat template leaves out {name}", "set data.chat_template to one that renders them"
                )

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, ask: bool = False) -> str:
        """The rendering; with ``ask``, followed by the prompt to generate. Raises `RowError` where it fails."""
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self._template(tools),
                add_generation_prompt=ask,
                tokenize=False,
            )
        except TemplateSyntaxError as error:
            raise InputError(f"data.chat_template is not valid Jinja (line {error.lineno}: {error.message})") from error
        except _TEMPLATE_FAULTS as error:
            raise RowError(f"the chat template fails: {type(error).__name__}: {error}") from error
        assert isinstance(rendered, str)
        return rendered

    @property
    def marks(self) -> bool:
        """Whether the template marks what the assistant generates."""
        return all(_MARK.search(template) for template in (self.template, self.tool_template) if template is not None)

    @property
    def asks(self) -> bool:
        """Whether the template has a prompt to generate."""
        return self.template is not None and "add_generation_prompt" in self.template

    @cached_property
    def special(self) -> tuple[str, ...]:
        """The tokenizer's added tokens, longest first; an end of turn is one of them."""
        return tuple(sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True))


@dataclass(frozen=True)
class Turns:
    """The turns of one conversation in its rendering ``full``."""

    renderer: Renderer
    chat: Chat
    full: str

    def span(self, i: int) -> Span:
        """What message ``i`` (the assistant's) generates, up to and with its end of turn.

        Raises `InputError` where that cannot be told exactly.
        """
        found = self._by_prefixes(i) or self._by_probe(i)
        start, end = found
        assert 0 <= start <= end <= len(self.full)
        return found

    def _by_prefixes(self, i: int) -> Span | None:
        asked = self._asked(i)
        until = self.full if i == len(self.chat.messages) - 1 else self._try(self.chat.messages[: i + 1])
        if asked is None or until is None or not until.startswith(asked) or not self.full.startswith(until):
            return None
        return len(asked), self._trimmed(len(asked), len(until))

    def _by_probe(self, i: int) -> Span:
        messages, word = self.chat.messages, self._unique_word()
        probe: Message = {"role": "assistant", "content": word}
        sides = self._sides([*messages[:i], probe, *messages[i + 1 :]], word)
        if sides is None or not self.full.endswith(sides[1]):
            raise self._refusal(i, "its words cannot be told from what follows them")
        before, after = sides
        start, words_end = self._start(i, before), len(self.full) - len(after)
        if start > words_end:
            raise self._refusal(i, "its rendering overlaps its neighbours")
        return start, self._trimmed(start, words_end + self._end_of_turn(i, probe, after))

    def _start(self, i: int, before: str) -> int:
        asked = self._asked(i)
        if asked is not None and self.full.startswith(asked):
            return len(asked)
        if not self.full.startswith(before):
            raise self._refusal(i, "what precedes it depends on its words")
        return len(before if self.renderer.asks else before.rstrip(" "))  # without a prompt, blanks are generated too

    def _end_of_turn(self, i: int, probe: Message, after: str) -> int:
        """How many characters of ``after`` end the turn: what ends a conversation that stops here."""
        alone = self._sides([*self.chat.messages[:i], probe], probe["content"])
        if alone is None:
            raise self._refusal(i, "the conversation up to it cannot be rendered")
        for tail in (alone[1], alone[1].rstrip()):
            if after.startswith(tail):
                return len(tail)
        token = self._closing_token(i, probe, after)
        if token is None:
            raise self._refusal(i, "it ends otherwise in the middle of a conversation than at its end")
        return len(token)

    def _closing_token(self, i: int, probe: Message, after: str) -> str | None:
        """The added token that ends a turn followed by another, if it is the same whoever speaks next."""
        token = next((special for special in self.renderer.special if after.startswith(special)), None)
        asked, unasked = self._asked(i), self._try(self.chat.messages[:i])
        if token is None or asked is None or unasked is None or asked[len(unasked) :].startswith(token):
            return None
        for role in ("user", "assistant"):
            sides = self._sides([*self.chat.messages[:i], probe, {"role": role, "content": "-"}], probe["content"])
            if sides is None or not sides[1].startswith(token):
                return None
        return token

    def _trimmed(self, start: int, end: int) -> int:
        """``end`` less the white space after an end-of-turn token; white space that itself ends the turn stays."""
        words = self.full[start:end].rstrip()
        return start + len(words) if words.endswith(self.renderer.special) else end

    def _asked(self, i: int) -> str | None:
        """The rendering that prompts for message ``i``; none where the template has no such prompt."""
        return self._try(self.chat.messages[:i], ask=True) if self.renderer.asks else None

    def _sides(self, messages: Sequence[Message], word: str) -> tuple[str, str] | None:
        text = self._try(messages)
        if text is None or text.count(word) != 1:
            return None
        before, _, after = text.partition(word)
        return before, after

    def _try(self, messages: Sequence[Message], *, ask: bool = False) -> str | None:
        """The rendering of a part; none where the template refuses it."""
        try:
            return self.renderer.text(messages, self.chat.tools, ask=ask)
        except RowError:
            return None

    def _unique_word(self) -> str:
        number = 0
        while (word := f"probe{number}word") in self.full:
            number += 1
        return word

    def _refusal(self, i: int, why: str) -> InputError:
        return InputError(
            f"the chat template doesn't show which tokens the assistant generates (message {i + 1}: {why}); {_REMEDY}"
        )


def renderer_for(tokenizer: Any, format_name: str, chat_template: str | None, learn: str) -> Renderer:
    """The renderer for a format. Raises `InputError` where template, format and what to learn don't go together."""
    if format_name == "text":
        if learn in ("completion", "assistant"):
            raise InputError(f"data.learn: {learn} makes no sense for plain text, which has no turns; set learn: all")
        return Renderer(tokenizer, None, "all")
    (template, tool_template), chats = (
        _templates(tokenizer, chat_template),
        format_name in ("messages", "conversations"),
    )
    if template is None and chats:
        raise InputError(
            f"{format_name} need a chat template and the tokenizer has none; set data.chat_template, or use a model "
            "with one (usually the -Instruct variant)"
            if chat_template != "none"
            else f"data.chat_template: none renders pairs only, and the data holds {format_name}; leave it out"
        )
    if template is None and learn == "assistant":
        raise InputError("data.learn: assistant needs a chat template; set data.chat_template or learn: completion")
    wanted = {"auto": "assistant" if chats else "completion"}.get(learn, learn)
    assert wanted in ("all", "completion", "assistant")
    return Renderer(tokenizer, template, wanted, tool_template)  # type: ignore[arg-type]


def use_template(tokenizer: Any, chat_template: str | None) -> None:
    """Give ``tokenizer`` the recipe's ``chat_template``, so that the tuned model is asked as it was taught.

    ``none`` takes its template away; None leaves it.
    """
    if chat_template is not None:
        tokenizer.chat_template = _templates(tokenizer, chat_template)[0]


def _templates(tokenizer: Any, chat_template: str | None) -> tuple[str | None, str | None]:
    """The template to use (inline, from a file, or the tokenizer's; none for plain text), and the one for tools."""
    if chat_template == "none":
        return None, None
    if chat_template is not None:
        return _given(chat_template), None
    own = tokenizer.chat_template
    if isinstance(own, dict):
        return own.get("default"), own.get("tool_use")
    return own or None, None


def _given(chat_template: str) -> str:
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"data.chat_template: {chat_template} is neither Jinja nor a file that can be read ({error}); "
            "give a path, the template itself, or none"
        ) from error
