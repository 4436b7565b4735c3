"""Which optimizer a run gets, and AdamW for weights that are held in half precision.

An update is often smaller than half the distance between two bf16 numbers and would round away. So the numbers
themselves live in float32, in the optimizer's state, and the model holds their rounding (``MasterAdamW``).

Bytes a trained weight, besides activations:

    | weights | optimizer  | weight | gradient | master | means | sum                                             |
    | bf16    | adamw      | 2      | 2        | 4      | 8     | 16 (gradients become float32 a chunk at a time) |
    | float32 | adamw      | 4      | 4        | -      | 8     | 16, and 2 while autocast holds a bf16 copy      |
    | float32 | adamw8bit  | 4      | 4        | -      | 2.03  | 10.03, and autocast's copy                      |

The alternative, float32 weights under autocast, takes no optimizer of its own, but then norms, residuals and
what they save for the backward are float32 as well, and each product casts its weights in every pass. It is what
``adamw8bit`` gets, whose kernels update weights in place.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from slipstream.train.options import TrainOptions

Choice = tuple[type[torch.optim.Optimizer], dict[str, Any]]
"""An optimizer's class and its arguments, as transformers' trainer takes them."""
CHUNK = 2**26
"""Numbers whose float32 gradients exist at a time: 256 MiB."""
HALF = (torch.bfloat16, torch.float16)


def choose_optimizer(options: TrainOptions, model: nn.Module) -> Choice | None:
    """What to train ``model`` with; None for torch's own fused AdamW, which float32 weights need no more than."""
    if options.optimizer == "adamw8bit":
        from slipstream.train.adamw_8bit import AdamW8bit

        return AdamW8bit, {"lr": options.learning_rate, "whole": _embeddings(model)}
    if trains_half_precision(model):
        return MasterAdamW, {"lr": options.learning_rate}
    return None


def _embeddings(model: nn.Module) -> list[torch.Tensor]:
    return [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]


def trains_half_precision(model: nn.Module) -> bool:
    """Whether any trained weight is held in half precision, so that small updates would be lost without a master."""
    return any(parameter.requires_grad and parameter.dtype in HALF for parameter in model.parameters())


class MasterAdamW(torch.optim.Optimizer):
    """AdamW that keeps a float32 master of every half-precision weight; the update is torch's fused AdamW.

    Weights that are float32 are their own masters. State of a weight: ``step`` (0-d float32), ``exp_avg``,
    ``exp_avg_sq`` and, in half precision, ``master`` (all float32, of the weight's shape).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """As ``torch.optim.AdamW``."""
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": False}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; the weights then hold their masters' rounding. No host sync."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for chunk in _chunks(parameter for parameter in group["params"] if parameter.grad is not None):
                self._update(group, chunk)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self._state_of(parameter) for parameter in parameters]
        masters = [state.get("master", parameter) for state, parameter in zip(states, parameters, strict=True)]
        adamw(
            masters,
            [parameter.grad.float() for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            capturable=group["capturable"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        rounded = [(p, m) for p, m in zip(parameters, masters, strict=True) if p is not m]
        if rounded:
            torch._foreach_copy_([_local(p) for p, _ in rounded], [_local(m) for _, m in rounded])

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.dtype in HALF:
                state["master"] = parameter.detach().float()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As the base class, but the state stays float32, where that rounds it to the weights' dtype."""
        super().load_state_dict(dict(state_dict))
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                self.state[parameter][name] = value.to(parameter.device, copy=True)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share, where weights are divided over ranks: DTensors know no such copy."""
    share: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return share


def _chunks(parameters: Iterator[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parameters of one device in lists of up to ``CHUNK`` numbers (or one parameter)."""
    chunk: list[torch.Tensor] = []
    numbers = 0
    for parameter in parameters:
        if chunk and (numbers + parameter.numel() > CHUNK or parameter.device != chunk[0].device):
            yield chunk
            chunk, numbers = [], 0
        chunk.append(parameter)
        numbers += parameter.numel()
    if chunk:
        yield chunk
