"""What one optimizer step goes through: tokens, documents, its loss, as its record will tell them."""

from dataclasses import dataclass
from typing import Any

import torch

from slipstream.device.segments import Segments


@dataclass
class StepTally:
    """What one optimizer step has gone through so far."""

    tokens: int = 0
    documents: int = 0
    padding: int = 0
    loss: torch.Tensor | None = None
    learned: torch.Tensor | None = None
    grad_norm: torch.Tensor | None = None
    learning_rate: float = 0.0

    def add(self, inputs: dict[str, Any], loss: torch.Tensor, learned: torch.Tensor) -> None:
        """One more batch, its loss (0-d) and the learned tokens of the whole step (0-d)."""
        rows, width = inputs["input_ids"].shape
        segments: Segments | None = inputs.get("segments")
        if segments is not None:
            self.documents += len(segments.lengths)
            self.padding += segments.padding
            self.tokens += segments.total - segments.padding
        else:  # padded batches; without the collator's lengths only the device knows where padding begins
            lengths = inputs.get("lengths")
            tokens = rows * width if lengths is None else sum(lengths)
            self.documents += rows if lengths is None else sum(map(bool, lengths))
            self.padding += rows * width - tokens
            self.tokens += tokens
        self.loss = loss if self.loss is None else self.loss + loss
        self.learned = learned
