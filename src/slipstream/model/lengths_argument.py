"""``seq_lengths`` among the arguments of a model's forward, so that trainers keep it and it is never passed over.

transformers' Trainer drops every column that the model's forward does not name (``remove_unused_columns``, on by
default) before the collator sees a row, and a packed row without ``seq_lengths`` is one long document. So an applied
model names it, on the instance. Models don't compute with it, since boundaries come as ``segments``: a batch that
brings lengths alone, from a collator that knows no boundaries, is refused.

The trade-off is one Python call a forward. The alternative, to ask users for ``remove_unused_columns=False``, is wrong
in silence where it is forgotten.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from slipstream.errors import InputError

NAME = "seq_lengths"


class LengthsArgument:
    """The forward of one model, with ``seq_lengths`` among its arguments; ``attach`` and ``detach`` once each."""

    def __init__(self, base: Any) -> None:
        """``base``: the Hugging Face model below wrappers."""
        self._base = base
        self._before: Callable[..., Any] | None = vars(base).get("forward")
        self._ours = MethodType(_naming(base.forward, self._before), base)  # a copy of the model has a copy of it

    def attach(self) -> None:
        """Put it on the instance."""
        self._base.forward = self._ours

    def detach(self) -> None:
        """Put back what was there; what another library has wrapped around it since is that library's."""
        if vars(self._base).get("forward") is not self._ours:
            return
        if self._before is None:
            del self._base.forward
        else:
            self._base.forward = self._before


def refuse_without_segments(arguments: Mapping[str, Any]) -> None:
    """Raise ``InputError`` for the lengths of packed documents without the ``Segments`` that attention reads."""
    if arguments.get(NAME) is not None and arguments.get("segments") is None:
        raise InputError(
            f"a batch with {NAME} and without segments: its documents would see each other; collate packed rows with "
            f"data_collator=slipstream.PackedCollator(tokens=...) (in a loop of your own, the loader's collate_fn)"
        )


def refuse_restarts(batch: Mapping[str, Any]) -> None:
    """Raise ``InputError`` for positions that start again within a row, as packed documents' do, without ``Segments``.

    On the host only: of what is on the device already nothing is asked.
    """
    refuse_without_segments(batch)
    positions = batch.get("position_ids")
    if batch.get("segments") is not None or positions is None or positions.device.type != "cpu":
        return
    again = (positions[..., 1:] == 0) & (positions[..., :-1] > 0)
    if bool(again.any()):
        raise InputError(
            f"a batch whose position_ids start again {int(again.sum())} times within its rows, without segments: its "
            f"documents would see each other; hand on the segments that slipstream.PackedCollator makes"
        )


def _naming(own: Callable[..., Any], before: Callable[..., Any] | None) -> Callable[..., Any]:
    """A function that calls a model's forward: ``before`` where the instance has one of its own, else the class's."""

    def forward(self: Any, *args: Any, seq_lengths: Any = None, **kwargs: Any) -> Any:
        refuse_without_segments({NAME: seq_lengths, **kwargs})
        return type(self).forward(self, *args, **kwargs) if before is None else before(*args, **kwargs)

    signature = inspect.signature(own)
    kinds = inspect.Parameter
    named = [p for p in signature.parameters.values() if p.kind is not kinds.VAR_KEYWORD]
    rest = [p for p in signature.parameters.values() if p.kind is kinds.VAR_KEYWORD]
    added = [] if NAME in signature.parameters else [kinds(NAME, kinds.KEYWORD_ONLY, default=None)]
    self_ = kinds("self", kinds.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(parameters=[self_, *named, *added, *rest])  # type: ignore[attr-defined]
    return forward
