"""Rendered text to tokens, and learned characters to learned tokens.

The whole document is tokenised once, as the model will see it, and offsets say which characters a token came from; a
token that touches a learned character is learned. A tokenizer without offsets is served only where tokenising the
learned and unlearned stretches apart gives the very same tokens, which is checked for each document.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.data.cache import digest
from slipstream.data.learn import Rendered, Renderer, Span
from slipstream.data.rows import RowError
from slipstream.errors import InputError

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Encoded:
    """One document: ``ids`` and ``learned``, both of its number of tokens."""

    ids: Ids
    learned: Mask


@dataclass(frozen=True)
class Encoder:
    """Tokenises what a `Renderer` made."""

    renderer: Renderer

    def __post_init__(self) -> None:
        tokenizer, renderer = self.renderer.tokenizer, self.renderer
        if renderer.plain and tokenizer.eos_token_id is None:
            raise InputError("the tokenizer has no end-of-text token (eos_token), so no document could end; set one")

    def encode(self, texts: Sequence[Rendered]) -> list[Encoded | RowError]:
        """One result a text, in order; a `RowError` for a text that cannot be tokenised."""
        if not texts:
            return []
        try:
            return list(self._batch(texts))
        except (TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            if len(texts) == 1:
                return [RowError(f"the tokenizer fails: {type(error).__name__}: {error}")]
            return [result for text in texts for result in self.encode([text])]

    def _batch(self, texts: Sequence[Rendered]) -> list[Encoded]:
        tokenizer, offsets = self.renderer.tokenizer, any(text.spans is not None for text in texts)
        output = tokenizer(
            [text.text for text in texts],
            add_special_tokens=self.renderer.plain,
            return_offsets_mapping=offsets and tokenizer.is_fast,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        made = []
        for i, text in enumerate(texts):
            ids = np.asarray(output["input_ids"][i], dtype=np.int64)
            if text.spans is None:
                learned = np.ones(len(ids), dtype=np.bool_)
            elif tokenizer.is_fast:
                learned = _touching(np.asarray(output["offset_mapping"][i], dtype=np.int64).reshape(-1, 2), text.spans)
            else:
                learned = self._apart(text.text, text.spans, ids)
            made.append(self._ended(Encoded(ids, learned)) if self.renderer.plain else Encoded(ids, learned))
        return made

    def _ended(self, document: Encoded) -> Encoded:
        """Plain text with one token at its end, and not two at its beginning."""
        tokenizer, ids, learned = self.renderer.tokenizer, document.ids, document.learned
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        if begin is not None and len(ids) > 1 and begin != end and ids[0] == ids[1] == begin:
            ids, learned = ids[1:], learned[1:]
        if len(ids) and ids[-1] == end:
            learned = learned.copy()
            learned[-1] = True
            return Encoded(ids, learned)
        return Encoded(np.append(ids, end), np.append(learned, True))

    def _apart(self, text: str, spans: Sequence[Span], ids: Ids) -> Mask:
        """The mask for a tokenizer without offsets, from stretches tokenised apart; they must give the same ids."""
        tokenizer, at = self.renderer.tokenizer, 0
        parts: list[int] = []
        learned: list[bool] = []
        for start, end in (*spans, (len(text), len(text))):
            for piece, wanted in ((text[at:start], False), (text[start:end], True)):
                some = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"] if piece else []
                parts.extend(some)
                learned.extend([wanted] * len(some))
            at = end
        lead = next((n for n in range(len(ids) - len(parts) + 1) if list(ids[n : n + len(parts)]) == parts), None)
        if lead is None or (lead and not self.renderer.plain):
            raise InputError(
                "the tokenizer gives no character offsets (it is not a fast one), and its tokens reach over the "
                "assistant's turns; use a model folder with tokenizer.json, or set data.learn: all"
            )
        mask = np.zeros(len(ids), dtype=np.bool_)
        mask[lead : lead + len(parts)] = learned
        return mask


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of everything that decides which ids a text becomes; the chat template is not part of it."""
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if not tokenizer.is_fast:
        settings = {key: str(value) for key, value in sorted(tokenizer.init_kwargs.items())}
        return digest(type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), special, settings)
    model = json.loads(tokenizer.backend_tokenizer.to_str())
    model.update(truncation=None, padding=None)  # left over from earlier calls
    return digest(model, special)


def _touching(offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> Mask:
    """Tokens (offsets of shape [tokens, 2]) that touch a span.

    A token of white space may have empty offsets at its end (tokenizers that trim them); it counts by the character
    before.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    starts = np.where(starts == ends, starts - 1, starts)
    mask = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in spans:
        mask |= (starts < end) & (ends > start)
    return mask
