"""The load-balance loss of a mixture of experts, over what is no padding.

Where a model's own configuration asks for it (``output_router_logits``), its loss has a second part that grows as the
router prefers some experts. transformers computes it over all rows it is given; in a packed row, without a mask, that
includes the padding, and padding is routed like any token. Here the router's logits are taken from the decoder and the
rows that are padding are left out: which they are is known on the host, from ``Segments``. transformers' own, which may
wait for the device, is not computed.

The formula is that of the Switch Transformer (Fedus et al. 2021, equations 4 to 6) as transformers writes it for K
experts a token: E times the sum over experts of the share of assignments and the mean probability, over all layers
together. It is weighted with ``router_aux_loss_coef`` and, as the cross-entropy beside it, with the batch's share of
the learned tokens of an optimizer step.

N: rows, tokens of the batch; E: experts; K: experts a token.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.decision import Decision
from slipstream.device.segments import Segments


@dataclass(frozen=True)
class Balance:
    """A model's load-balance loss."""

    coefficient: float
    top_k: int

    @contextmanager
    def listen(self, base: Any) -> Iterator[list[torch.Tensor]]:
        """The router's logits, [N, E] a layer, of a forward of ``base`` inside the context."""
        heard: list[torch.Tensor] = []
        decoder = base.get_decoder()
        with ExitStack() as hooks:
            if decoder is not base:  # the whole model would compute the loss over everything
                hooks.callback(base.register_forward_pre_hook(_asked(False), with_kwargs=True).remove)
            hooks.callback(decoder.register_forward_pre_hook(_asked(True), with_kwargs=True).remove)
            hooks.callback(decoder.register_forward_hook(lambda *seen: heard.extend(seen[2].router_logits)).remove)
            yield heard

    def loss(self, logits: Sequence[torch.Tensor], inputs: Mapping[str, Any]) -> torch.Tensor:
        """The weighted loss of one batch (0-d float32)."""
        return self.coefficient * balance_loss(logits, self.top_k, _real_rows(inputs))


def find_balance(base: Any) -> tuple[Balance | None, Decision | None]:
    """The load-balance loss that a model's configuration asks for, and the decision; none for a model without one."""
    config = base.config.get_text_config()
    coefficient, top_k = (getattr(config, name, None) for name in ("router_aux_loss_coef", "num_experts_per_tok"))
    if not coefficient or not top_k or "output_router_logits" not in inspect.signature(base.forward).parameters:
        return None, None
    if not getattr(config, "output_router_logits", False):
        reason = "the model's configuration does not ask for it (output_router_logits: false)"
        return None, Decision("balance loss", False, reason)
    recorded = getattr(base.get_decoder(), "_can_record_outputs", None)
    if recorded is not None and "router_logits" not in recorded:
        reason = f"{type(base).__name__} of this transformers gives no router logits, and no such loss by itself either"
        return None, Decision("balance loss", False, reason)
    reason = f"weighted with router_aux_loss_coef {coefficient:g}, padding left out"
    return Balance(float(coefficient), int(top_k)), Decision("balance loss", True, reason)


def balance_loss(logits: Sequence[torch.Tensor], top_k: int, real_N: torch.Tensor | None = None) -> torch.Tensor:
    """The load-balance loss of ``logits`` ([N, E] a layer), 0-d float32; ``real_N`` is 1 for each row that counts.

    At least ``top_k``, and that only where every expert has an equal share. No host sync.
    """
    experts = logits[0].shape[-1]
    assigned_E, probability_E = logits[0].new_zeros(2, experts, dtype=torch.float32)
    rows = torch.zeros((), device=logits[0].device)
    for layer_NE in logits:
        weight_N1 = (layer_NE.new_ones(len(layer_NE), dtype=torch.float32) if real_N is None else real_N)[:, None]
        probability_NE = torch.softmax(layer_NE, dim=-1, dtype=torch.float32)
        chosen_NK = probability_NE.detach().topk(top_k, dim=-1).indices
        chosen_NE = torch.zeros_like(probability_NE).scatter_(1, chosen_NK, 1.0)
        assigned_E = assigned_E + (weight_N1 * chosen_NE).sum(0)
        probability_E = probability_E + (weight_N1 * probability_NE).sum(0)
        rows = rows + weight_N1.sum()
    rows = rows.clamp(min=1)  # a batch may be all padding, where ranks share rows unevenly
    loss: torch.Tensor = experts * (assigned_E / rows * (probability_E / rows)).sum()
    return loss


def _real_rows(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """float32 [N]: 1 for each token of a document, 0 for padding; None where there is none."""
    segments: Segments | None = inputs.get("segments")
    mask: torch.Tensor | None = inputs.get("attention_mask")
    if segments is not None:
        real: torch.Tensor = segments.on(inputs["input_ids"].device).real()
        return real
    return None if mask is None else mask.flatten().float()


def _asked(logits: bool) -> Any:
    """A pre-hook that asks a forward for the router's logits, or not to."""

    def ask(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "output_router_logits": logits}

    return ask
