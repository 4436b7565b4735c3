"""bitsandbytes' 8-bit AdamW without its waits.

Its kernels run on the device's default stream, whatever the current one is, and so it synchronises the device after
every parameter: hundreds of waits a step. Here the two streams wait for each other by events, once a step, and where
they are one and the same, as in a plain loop, not at all. The updates are bitsandbytes' own. Their step count and
learning rate are numbers on the host, so that a CUDA graph can't hold this optimizer: it runs after a captured step.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from bitsandbytes import optim


class AdamW8bit(optim.AdamW8bit):  # type: ignore[misc]
    """bitsandbytes' ``AdamW8bit``, update for update.

    ``whole``: weights whose running means stay in float32 (embeddings: rarely seen rows make outliers of a block).
    """

    def __init__(self, params: Iterable[Any], *, whole: Iterable[torch.Tensor] = (), **named: Any) -> None:
        """``named``: as bitsandbytes' class takes them."""
        super().__init__(params, **named)
        self.initialized: bool
        self.whole = {id(parameter) for parameter in whole}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. No host sync."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.initialized:
            self.check_overrides()
            self.to_gpu()
            self.initialized = True
        devices = {parameter.device for group in self.param_groups for parameter in group["params"]}
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(_on_default_stream(device))
            self._update_all()
        return loss

    def _update_all(self) -> None:
        for group_index, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.init_state(group, parameter, group_index, index)
                self.update_step(group, parameter, group_index, index)

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """The settings of one weight; as many bits for its means as it should have."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)
        return {**config, "optim_bits": 32} if id(group["params"][pindex]) in self.whole else config


@contextmanager
def _on_default_stream(device: torch.device) -> Iterator[None]:
    """Work inside is ordered after what the device's current stream holds, and before what comes after it."""
    if device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        yield
        return
    current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    default.wait_stream(current)
    with torch.cuda.stream(default):
        yield
    current.wait_stream(default)
