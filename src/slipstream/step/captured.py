"""Forward, loss and backward of a packed batch as a CUDA graph, replayed for every step.

A step of small kernels is bound by the host that launches them. A packed batch always has the same shapes, so all its
launches can be recorded once and replayed by a single one. What differs from batch to batch lies in a ``StaticBatch``;
gradients are added to buffers that stay where they are and are the parameters' ``grad``. A graph is recorded for each
``BatchShape`` at its first batch; all graphs share one memory pool, since only one runs at a time.

Trade-off: the memory of a recorded step stays taken between steps, and whatever the host would decide in a step must be
decided before. A capture that fails leaves parameters and gradients as they were and raises ``CaptureError`` with the
reason; the caller goes on in another mode.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.device.static_batch import BatchShape, StaticBatch
from slipstream.errors import InputError

WARM_UP, AGAIN = 2, 1
"""Runs before the first recording, and before those of other shapes: libraries choose kernels and allocate workspaces
in their first calls."""
Loss = Callable[[Mapping[str, Any]], torch.Tensor]
"""A batch → its summed loss, 0-d float32, with a graph behind it. Launches only: it may not wait for the device."""


class CaptureError(RuntimeError):
    """A step that could not be recorded; the message says why."""


class RecordingMemoryError(InputError):
    """Memory ran out while a step was recorded; the message says how much was asked, had, and what to lower."""


@dataclass(frozen=True)
class _Recorded:
    batch: StaticBatch
    graph: torch.cuda.CUDAGraph
    loss: torch.Tensor
    """0-d float32, overwritten by each replay."""
    addresses: tuple[int, ...]
    """Where the parameters lay when the step was recorded."""


class CapturedStep:
    """Adds the gradients of one batch's mean loss to the parameters, by replaying a graph."""

    def __init__(
        self,
        loss: Loss,
        parameters: Sequence[nn.Parameter],
        forget: Callable[[], None] = lambda: None,
        recording: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``loss``: see ``Loss``; ``parameters``: what is trained, all on one CUDA device.

        ``forget``: drops whatever keeps the graph of an earlier forward. Autograd ties a parameter's node to the stream
        on which it was made, for as long as such a graph lives; a recording that meets a node of another stream fails.
        ``recording``: the context in which a step is recorded; a replay needs none.
        """
        self._loss, self._parameters, self._forget, self._recording = loss, list(parameters), forget, recording
        self._device = self._parameters[0].device
        self._gradients = [torch.zeros_like(p, requires_grad=False) for p in self._parameters]
        self._recorded: dict[BatchShape, _Recorded] = {}
        self._pool: Any = None
        self.recordings = 0
        """How many graphs were recorded."""

    def __call__(self, batch: Mapping[str, Any], learned: torch.Tensor | float) -> torch.Tensor:
        """The batch's summed loss divided by ``learned`` (0-d float32); its gradients are added to ``grad``.

        ``learned``: learned tokens of the whole optimizer step. Raises ``CaptureError`` where a recording fails,
        ``RecordingMemoryError`` where memory runs out in it, and ``InputError`` for a batch that has no fixed shape.
        """
        self._attach_gradients()
        shape = BatchShape.of(batch)
        recorded = self._for(shape) or self._record(shape, batch, learned)
        recorded.batch.fill(batch, learned)
        recorded.graph.replay()
        return recorded.loss.clone()

    def release(self) -> None:
        """Give all graphs and their memory back; the next call records again."""
        self._recorded.clear()
        self._pool = None
        gc.collect()
        torch.cuda.empty_cache()

    def _for(self, shape: BatchShape) -> _Recorded | None:
        """The smallest recorded step that takes the shape and still finds the parameters in their places."""
        fitting = [kept for kept in self._recorded if kept.holds(shape)]
        if not fitting:
            return None
        found = self._recorded[min(fitting, key=lambda kept: (kept.longest, kept.segments))]
        if found.batch.shape != shape and shape.longest * 2 < found.batch.shape.longest:
            return None  # a kernel would launch mostly for nothing
        if found.addresses != self._addresses():
            self.release()
            return None
        return found

    def _addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self._parameters)

    def _attach_gradients(self) -> None:
        """Put the static gradients in place; those an optimizer has dropped since are zero again."""
        dropped = [p.grad is None for p in self._parameters]
        if all(dropped):
            torch._foreach_zero_(self._gradients)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is gradient:
                continue
            if parameter.grad is not None:  # of a step in another mode
                gradient.copy_(parameter.grad)
            elif not all(dropped):
                gradient.zero_()
            parameter.grad = gradient

    def _record(self, shape: BatchShape, batch: Mapping[str, Any], learned: torch.Tensor | float) -> _Recorded:
        static = StaticBatch(shape, self._device)
        static.fill(batch, learned)
        self._forget()
        try:
            with self._recording():
                self._warm_up(static)
                self._forget()
                gc.collect()
                torch.cuda.empty_cache()
                recorded = self._capture(static)
        except torch.OutOfMemoryError as error:
            raise RecordingMemoryError(_no_memory(error, shape)) from error.with_traceback(None)
        except RuntimeError as error:
            torch.cuda.synchronize(self._device)
            first = _first(error)
            raise CaptureError(f"{type(first).__name__}: {str(first).strip()}") from error.with_traceback(None)
        finally:
            static.segments.forget()
            self._forget()
        self._recorded[shape] = recorded
        self.recordings += 1
        return recorded

    def _warm_up(self, static: StaticBatch) -> None:
        """Run on a stream of its own, as the recording does, and drop what comes out."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(AGAIN if self.recordings else WARM_UP):
                self._gradients_of(static)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)

    def _capture(self, static: StaticBatch) -> _Recorded:
        graph = torch.cuda.CUDAGraph()
        # only this thread's calls count: a loader's thread may pin memory meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            loss, gradients = self._gradients_of(static)
            torch._foreach_add_(self._gradients, gradients)
        self._pool = self._pool or graph.pool()
        return _Recorded(static, graph, loss, self._addresses())

    def _gradients_of(self, static: StaticBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The mean loss and every parameter's gradient of the batch in the buffers."""
        static.segments.forget()
        loss = self._loss(static.inputs) / static.learned
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        found = [torch.zeros_like(p) if g is None else g for p, g in zip(self._parameters, gradients, strict=True)]
        return loss.detach(), found


def _first(error: BaseException) -> BaseException:
    """The error that came before all others: ending a broken recording raises one of its own."""
    while (before := error.__context__) is not None:
        error = before
    return error


def _no_memory(error: torch.OutOfMemoryError, shape: BatchShape) -> str:
    """What was asked and had, in PyTorch's words, and what to lower."""
    told = str(error).split(" If reserved", maxsplit=1)[0]
    return (
        f"out of memory while recording a step of {shape.tokens:,} tokens: {told} "
        f"Lower packing.tokens or packing.rows, or set memory.activations: recompute or offload"
    )
