"""A batch's summed loss: the model's forward, its output head, cross-entropy.

Shared by the trainer and by ``TrainStep``; all it does is launched without asking the device for anything, so that a
step made of it can be recorded.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.device.segments import Segments
from slipstream.errors import InputError
from slipstream.model.head import find_head
from slipstream.model.lengths_argument import refuse_without_segments
from slipstream.train.balance import find_balance
from slipstream.train.loss import learned_tokens, summed_cross_entropy
from slipstream.transform import applied, base_model

HOST_ONLY = ("labels", "lengths")
"""Parts of a batch that the model is not given."""


class BatchLoss:
    """Batches → summed losses, by one model."""

    def __init__(self, model: nn.Module, autocast: Callable[[torch.device], AbstractContextManager[Any]]) -> None:
        """``autocast``: a device → the context in which layers and head run."""
        base = base_model(model)
        self.decoder: nn.Module = base.get_decoder()
        self.head, self.decision = find_head(base)
        """The output head where the loss may run it on chunks, and the decision about it."""
        self.balance, self.balance_decision = find_balance(base)
        """The load-balance loss that a mixture of experts asks for, and the decision about it; None for neither."""
        self.compiled = False
        """Whether the loss's elementwise work runs in compiled kernels."""
        self._autocast = autocast

    def __call__(
        self, model: nn.Module, inputs: Mapping[str, Any], *, whole_logits: bool = False, balanced: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """The summed cross-entropy (0-d float32), and what the model gave (logits of one token only, unless whole).

        ``balanced`` adds the load-balance loss, weighted by the batch's learned tokens, so that a step's is the mean
        over its batches. ``model``: the one given, or a wrapper around it. Raises ``InputError`` where no attention
        read the segments, or documents' lengths come without segments.
        """
        if self.balance is None or not balanced:
            return self._cross_entropy(model, inputs, whole_logits)
        with self.balance.listen(base_model(model)) as router_logits:
            total, outputs = self._cross_entropy(model, inputs, whole_logits)
        return total + self.balance.loss(router_logits, inputs) * learned_tokens(inputs["labels"]), outputs

    def _cross_entropy(
        self, model: nn.Module, inputs: Mapping[str, Any], whole_logits: bool
    ) -> tuple[torch.Tensor, Any]:
        refuse_without_segments(inputs)  # also where nothing was applied to the model
        labels = inputs["labels"]
        arguments = {name: value for name, value in inputs.items() if name not in HOST_ONLY}
        chunked = self.head is not None and not whole_logits
        if chunked:
            arguments["logits_to_keep"] = 1  # the model's own head runs on one token; 0 would mean all
        with self._autocast(labels.device), self._hidden_states() as hidden:
            outputs = model(**arguments)
            _refuse_unread(model, inputs.get("segments"))
            if chunked and len(hidden) == 1:
                return summed_cross_entropy(hidden[0], labels, self.head, compiled=self.compiled), outputs
            assert not chunked, f"the decoder ran {len(hidden)} times in one forward"
            return summed_cross_entropy(outputs.logits, labels), outputs

    @contextmanager
    def _hidden_states(self) -> Iterator[list[torch.Tensor]]:
        """What the decoder gives inside the context: its last hidden states [B, T, H], one entry a forward."""
        seen: list[torch.Tensor] = []
        hook = self.decoder.register_forward_hook(lambda module, args, output: seen.append(output[0]))
        try:
            yield seen
        finally:
            hook.remove()


def _refuse_unread(model: nn.Module, segments: Segments | None) -> None:
    """Refuse a forward in which no attention asked for the boundaries: without ``apply`` documents see each other.

    A batch that an applied model has seen before has readers; hence the look at the model.
    """
    if segments is not None and (applied(model) is None or not segments.readers):
        raise InputError(
            f"{type(model).__name__} did not read the segments of its batch, so documents would see each other; "
            f"give the trainer slipstream.apply(model) (or TrainStep, in a loop of your own)"
        )
