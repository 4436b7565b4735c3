"""From hidden states to logits, apart from the rest of the model: what a loss needs that never holds T x V logits.

A causal model's forward ends in its output head and, in some families, a scale or a soft cap of the logits. Where these
few steps alone give what the model's own forward gives (tried once, on four tokens), the loss may run them on a chunk
of tokens at a time, and again in the backward. Where they don't, the model has a tail of its own: the whole row's
logits are then taken from the model as before.

Shapes: C tokens of a chunk, H hidden width, V vocabulary.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.decision import Decision

TRIED = 4
"""Tokens of the forward on which the head is compared with the model's own."""
TOLERANCE = 5e-3
"""Largest relative difference to the model's own logits: rounding in half precision is below it."""


@dataclass(frozen=True)
class Head:
    """A model's output head with what follows it."""

    project: nn.Module
    """Hidden states → logits; with peft it may be wrapped."""
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden_CH: torch.Tensor) -> torch.Tensor:
        """Logits [C, V] in the head's dtype."""
        logits_CV: torch.Tensor = self.project(hidden_CH)
        if self.softcap is not None:
            logits_CV = torch.tanh(logits_CV / self.softcap) * self.softcap
        return logits_CV if self.scale == 1.0 else logits_CV * self.scale

    def frozen_weight(self) -> torch.Tensor | None:
        """The weight [V, H] where the head is nothing but a product with it and it isn't trained; else None."""
        project: Any = self.project
        if type(project) is not nn.Linear or getattr(project, "bias", None) is not None:
            return None
        if "forward" in vars(project) or project._forward_hooks:
            return None
        weight: torch.Tensor = project.weight
        return None if weight.requires_grad or not weight.is_floating_point() else weight


def find_head(base: Any) -> tuple[Head | None, Decision]:
    """The head of a transformers model, if it gives the model's own logits, and the decision about the loss.

    Runs the model once on a few tokens, without gradients.
    """
    project = base.get_output_embeddings()
    if project is None or next(base.parameters()).is_meta:
        return None, _off("the model has no output head to be called by itself")
    if "logits_to_keep" not in inspect.signature(base.forward).parameters:
        return None, _off("the model can't be kept from making all logits")
    config = base.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    head = Head(project, scale, getattr(config, "final_logit_softcapping", None))
    difference = _difference(base, head)
    if not difference <= TOLERANCE:
        return None, _off(f"the model's logits are not its head's (relative difference {difference:.1e})")
    return head, Decision("chunked loss", True, "logits are made a chunk of tokens at a time, never for the whole row")


def _off(why: str) -> Decision:
    return Decision("chunked loss", False, f"{why}: logits of the whole row are kept")


@torch.no_grad()
def _difference(base: Any, head: Head) -> float:
    """The relative difference between the head's logits and the model's, in the norm."""
    seen: list[torch.Tensor] = []
    decoder = base.get_decoder()
    hook = decoder.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    training = base.training
    base.eval()
    try:
        ids = torch.ones((1, TRIED), dtype=torch.int64, device=next(base.parameters()).device)
        own = base(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        hook.remove()
        base.train(training)
    if len(seen) != 1 or seen[0].shape[:2] != (1, TRIED):
        return float("inf")
    return float((head(seen[0][0]).float() - own).norm() / own.norm())
