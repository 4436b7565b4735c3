"""One batch's forward and backward, eager, compiled or captured: one call, three ways.

The mode is chosen beforehand (``choice.py``) and every change of it afterwards is a ``Decision``: a step whose capture
fails goes on compiled, and one whose compilation fails goes on eager, with the same gradients and the reason. What is
installed on the model for it (compiled layers, half-precision adapters) is taken away again by ``close``.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from slipstream.decision import Decision
from slipstream.memory.checkpointing import checkpoints
from slipstream.model.half_adapters import HalfAdapters, forget_copies
from slipstream.step.captured import CapturedStep, CaptureError, Loss, RecordingMemoryError
from slipstream.step.choice import Circumstances, Mode, ModeChoice, choose_mode, compile_obstacle
from slipstream.step.regional import CompiledLayers
from slipstream.step.second_try import Retreat, Rewind
from slipstream.transform import base_model, release_graphs, rest_host_memory

SHOWN_ERROR = 400
"""Characters of an error that a decision keeps."""


class Step:
    """Adds the gradients of a batch's loss to its model's parameters, in the best mode that works."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        parameters: Sequence[nn.Parameter],
        about: Circumstances,
        asked: ModeChoice = "auto",
        *,
        dtype: torch.dtype = torch.float32,
        on_change: Callable[[Decision], None] | None = None,
    ) -> None:
        """``loss``: a batch → its summed loss; ``dtype``: what layers compute in, under autocast or by their weights.

        ``on_change`` is told when a mode is given up later. Raises ``InputError`` where ``asked`` can't be had.
        """
        self.mode: Mode
        self.mode, decision = choose_mode(asked, about)
        base = base_model(model)
        self._adapters, half = HalfAdapters.attach(base, dtype)
        self.decisions = [decision, half]
        """What was decided about this step, and about its mode since."""
        self._model, self._about, self._loss, self._on_change = model, about, loss, on_change
        self._layers = None if self.mode == "eager" else CompiledLayers(base.get_decoder())
        self._parameters = list(parameters)
        self._captured = None
        if self.mode == "captured":
            self._captured = CapturedStep(loss, self._parameters, partial(forget_copies, base), self.layers)
        if self._layers is not None and self._adapters is not None:
            self.decisions.append(self._adapters.join(base))
            if checkpoints(base):
                self._adapters.leave_last_uncompiled(base)
        self._settled = False

    def __call__(self, batch: Mapping[str, Any], learned: torch.Tensor | float) -> torch.Tensor:
        """The batch's summed loss divided by ``learned`` (0-d float32, detached); gradients are added to ``grad``."""
        retreat = Retreat.before(self._model)
        replayed = self._replayed(batch, learned, retreat)
        if replayed is not None:
            return replayed
        return self.between_layers(batch, partial(self._backward, batch, learned), retreat)

    def between_layers(
        self, batch: Mapping[str, Any], run: Callable[[], torch.Tensor], retreat: Retreat | None = None
    ) -> torch.Tensor:
        """What ``run`` gives, a forward and backward of ``batch``, with the model's layers as this mode runs them.

        Where memory runs out while activations are offloaded, and fewer reload buffers leave more of it, ``run`` is
        called a second time, with gradients and random state as they were. ``retreat``: since before an attempt of
        another kind.
        """
        retreat = retreat or Retreat.before(self._model)
        if retreat.offload is None:
            return self._settled_run(batch, run)
        rewind = Rewind(self._parameters, whole=self._about.whole)
        try:
            try:
                return self._settled_run(batch, run)
            except torch.OutOfMemoryError:
                if not retreat.gains() or not rewind.possible:
                    raise
            # out of the handler, whose traceback keeps what the step has allocated
            gc.collect()
            rewind()
            return self._settled_run(batch, run)
        finally:
            rewind.done()

    def _replayed(
        self, batch: Mapping[str, Any], learned: torch.Tensor | float, retreat: Retreat
    ) -> torch.Tensor | None:
        """The captured step's loss; None where nothing is captured, or no longer. Recorded again with fewer buffers."""
        while self._captured is not None:
            try:
                return self._captured(batch, learned)
            except CaptureError as error:
                self._give_up_capture(str(error))
            except RecordingMemoryError:
                if not retreat.gains():
                    raise
                retreat = Retreat.before(self._model)  # which gains once more only where there are buffers left
            gc.collect()
        return None

    def _settled_run(self, batch: Mapping[str, Any], run: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.settle(batch)
        with self.layers():
            return run()

    def _backward(self, batch: Mapping[str, Any], learned: torch.Tensor | float) -> torch.Tensor:
        loss = self._loss(batch) / learned
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def settle(self, batch: Mapping[str, Any]) -> None:
        """Before the first step of compiled layers: compile them on this batch, or go on eager with the reason.

        Gradients are left alone, so that a backward which fails halfway has not added to them.
        """
        if self.mode != "compiled" or self._settled:
            return
        try:
            with self.layers():
                torch.autograd.grad(self._loss(batch), self._parameters, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._layers, self.mode = None, "eager"
            reason = f"eager: compiling failed: {type(error).__name__}: {_shortened(str(error))}"
            self._decide(Decision("step", False, reason))
        self._settled = True

    @property
    def recordings(self) -> int:
        """How many graphs were recorded so far."""
        return 0 if self._captured is None else self._captured.recordings

    @contextmanager
    def layers(self) -> Iterator[None]:
        """The model's layers as this mode runs them."""
        if self._layers is None:
            yield
        else:
            with self._layers.active():
                yield

    def close(self) -> None:
        """Leave the model as it was, and give graphs back, and what steps took of device and host; gradients stay."""
        if self._adapters is not None:
            self._adapters.detach()
        if self._captured is not None:
            self._captured.release()
            release_graphs(self._model)
        rest_host_memory(self._model)
        self._adapters, self._captured, self._layers = None, None, None

    def _give_up_capture(self, why: str) -> None:
        assert self._captured is not None
        self._captured.release()
        release_graphs(self._model)
        self._captured = None
        self.mode = "eager" if compile_obstacle(self._about) else "compiled"
        self._decide(Decision("step", self.mode != "eager", f"{self.mode}: recording failed: {_shortened(why)}"))

    def _decide(self, decision: Decision) -> None:
        self.decisions = [decision, *(one for one in self.decisions if one.name != decision.name)]
        if self._on_change is not None:
            self._on_change(decision)


def _shortened(text: str) -> str:
    """An error's first lines on one, as far as a reader wants them."""
    flat = " ".join(text.split())
    return flat if len(flat) <= SHOWN_ERROR else f"{flat[:SHOWN_ERROR]}..."
