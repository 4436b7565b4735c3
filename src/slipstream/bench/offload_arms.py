"""The arms of the offload benchmark: one model, its layers recomputed from inputs that stay or that leave the device.

All arms share the model, one batch, and one pool of pinned host buffers (pinning it anew in every round would take
longer than the round), and differ in what their ``prepare`` sets: the layers' checkpoint functions and the number of
reload buffers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from slipstream.bench.harness import Arm
from slipstream.bench.shapes import adapted_model, bench_dtype
from slipstream.cost.offload import Split
from slipstream.cost.tiles import TilesChoice
from slipstream.decision import Decision
from slipstream.device.feed import PackedCollator
from slipstream.memory.checkpointing import Checkpointing, restore_checkpointing, set_checkpointing
from slipstream.memory.host_budget import host_budget
from slipstream.memory.offload import ContextFn, Offload
from slipstream.model.half_adapters import HalfAdapters
from slipstream.step.regional import CompiledLayers
from slipstream.train.forward import BatchLoss
from slipstream.train.loss import learned_tokens
from slipstream.transform import ATTRIBUTE, Options, apply, base_model, restore

Mode = Literal["eager", "compiled"]
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
RECOMPUTE, SINGLE, DOUBLE, AUTO = "recompute", "offload-1", "offload-2", "offload-auto"
BUFFERS: Mapping[str, int | str] = {SINGLE: 1, DOUBLE: 2, AUTO: "auto"}
"""Reload buffers of the arms that offload."""


@dataclass(eq=False)
class Bench:
    """One shape's model on one device, with what a step needs; ``close`` it."""

    model: Any
    device: torch.device
    dtype: torch.dtype
    optimizer: torch.optim.Optimizer
    parameters: list[torch.nn.Parameter]
    batch_loss: BatchLoss
    mode: Mode = "eager"
    notes: list[Decision] = field(default_factory=list)
    """What turned out otherwise than planned."""
    undo: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def of(cls, config: Any, device: torch.device, mode: Mode = "eager", tiles: TilesChoice = "none") -> "Bench":
        """A random model of this configuration with an adapter, packed attention, and fused AdamW.

        ``compiled``: layers compiled and adapters computed in half precision, as the trainer runs them where it can.
        ``tiles``: of MLPs; none where copies are timed, so that a layer's backward is the same in all rows.
        """
        model = adapted_model(config, device)
        dtype = bench_dtype(device)
        apply(model, Options(activations="keep", compute_dtype=dtype, tiles=tiles))
        restore_checkpointing(getattr(base_model(model), ATTRIBUTE).checkpointing)  # the arms set their own
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        loss = BatchLoss(model, partial(_autocast, dtype))
        loss.compiled = mode == "compiled"
        made = cls(model, device, dtype, optimizer, parameters, loss, mode)
        if mode == "compiled":
            adapters, _ = HalfAdapters.attach(made.base, dtype)
            if adapters is not None:
                made.undo.callback(adapters.detach)
            made.undo.enter_context(CompiledLayers(made.base.get_decoder()).active())
        return made

    def close(self) -> None:
        """Leave the model as it was, without gradients."""
        self.undo.close()
        self.optimizer.zero_grad(set_to_none=True)
        restore(self.model)

    @property
    def base(self) -> Any:
        """The Hugging Face model below peft."""
        return base_model(self.model)

    @property
    def layers(self) -> int:
        """Decoder layers, L."""
        return int(self.base.config.num_hidden_layers)

    def checkpointing(
        self, split: Split, offload: Offload | None = None, context_fn: ContextFn | None = None
    ) -> Checkpointing:
        """Set the layers' functions without a guard that would put them back when the arms change."""
        made = set_checkpointing(self.base, split, decide=self.notes.append, offload=offload, context_fn=context_fn)
        for hook in made.hooks:
            hook.remove()
        return made


def _autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Half precision for what layers compute, as in the trainer."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


@dataclass(eq=False)
class Row:
    """One batch on the device."""

    inputs: dict[str, Any]
    labels: torch.Tensor

    @classmethod
    def of(cls, documents: list[dict[str, list[int]]], tokens: int, device: torch.device) -> "Row":
        """The documents packed into one row."""
        batch = PackedCollator(tokens=tokens)(documents)
        segments = batch.pop("segments")
        batch = {name: value.to(device) for name, value in batch.items()}
        return cls({**batch, "segments": segments.on(device)}, batch.pop("labels"))


@dataclass(eq=False)
class Step:
    """One arm's training step."""

    bench: Bench
    row: Row
    put: Callable[[], None]
    """Give the layers this arm's functions."""
    loss: torch.Tensor | None = None
    peaks: list[int] = field(default_factory=list)
    """The most bytes allocated in each step, on a card."""

    def arm(self) -> Arm:
        """The step as the harness times it."""
        return Arm({FORWARD: self.forward, BACKWARD: self.backward, UPDATE: self.update}, self.prepare)

    def prepare(self) -> None:
        """Switch to this arm and begin to watch its memory."""
        self.loss = None
        self.put()
        if self.bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.bench.device)

    def forward(self) -> None:
        """The mean loss of the row's learned tokens; logits are made in chunks, as in the trainer."""
        inputs = {**self.row.inputs, "labels": self.row.labels}
        total, _ = self.bench.batch_loss(self.bench.model, inputs)
        self.loss = total / learned_tokens(self.row.labels)

    def backward(self) -> None:
        """Gradients of everything trained."""
        assert self.loss is not None
        self.loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Clip, step, forget the gradients."""
        torch.nn.utils.clip_grad_norm_(self.bench.parameters, 1.0)
        self.bench.optimizer.step()
        self.bench.optimizer.zero_grad(set_to_none=True)
        self.loss = None
        if self.bench.device.type == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated(self.bench.device))

    def run(self) -> None:
        """The whole step, untimed."""
        self.prepare()
        for part in (self.forward, self.backward, self.update):
            part()

    def gradient(self) -> torch.Tensor:
        """All trained parameters' gradients of one step, end to end, in float32."""
        self.prepare()
        self.forward()
        self.backward()
        found = torch.cat([p.grad.flatten().float() for p in self.bench.parameters if p.grad is not None])
        self.bench.optimizer.zero_grad(set_to_none=True)
        self.loss = None
        return found


@contextmanager
def steps(bench: Bench, row: Row, arms: tuple[str, ...], host_limit: float | None) -> Iterator[dict[str, Step]]:
    """The arms by name, and afterwards the model and the host's memory as they were."""
    layers = bench.layers
    offload = Offload(
        layers=layers - 1,
        buffers=1,
        host=host_budget(host_limit),
        strict=True,
        decide=bench.notes.append,
    )
    plain = bench.checkpointing(Split(0, layers, 0))
    leaving = bench.checkpointing(Split(0, 1, layers - 1), offload)
    try:
        yield {
            name: Step(bench, row, plain.put if name == RECOMPUTE else partial(_put, leaving, offload, BUFFERS[name]))
            for name in arms
        }
    finally:
        restore_checkpointing(leaving)
        restore_checkpointing(plain)


def _put(leaving: Checkpointing, offload: Offload, buffers: Any) -> None:
    offload.set_buffers(buffers)
    leaving.put()


def offload_of(step: Step) -> Offload | None:
    """The offload behind an arm, if it has one."""
    return step.put.args[1] if isinstance(step.put, partial) else None
