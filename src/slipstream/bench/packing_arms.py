"""The arms of the packing benchmark: one model instance, four ways to tell its attention where documents end.

Switching happens in an arm's ``prepare``: ``restore``, the arm's own attention, a fresh batch, and one forward without
gradients, so that what an arm does only once after a switch (a check, an allocation) is in no arm's time. All arms
share the model, the optimizer and the checkpoint function; gradient checkpointing is set once for all.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.bench.harness import Arm
from slipstream.bench.shapes import adapted_model, bench_dtype
from slipstream.bench.wasteful import METADATA, Kind, PackedRow, register_wasteful, wasteful_key
from slipstream.cost.estimate import LOSS_CHUNK
from slipstream.data.batch import IGNORE
from slipstream.device.feed import PackedCollator
from slipstream.device.segments import Segments
from slipstream.model.attention import mask_placeholder
from slipstream.train.loss import learned_tokens, summed_cross_entropy
from slipstream.transform import Options, apply, base_model, restore

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
LAYER, LAYER_BACKWARD = "layer", "layer backward"
"""The timed parts of ``LayerCalls``."""
STOCK, OURS = "stock", "slipstream"
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""How far two arms' losses and gradients may differ, relative to their spread; a leak between documents is near 1."""


class ResultsDifferError(RuntimeError):
    """Two arms that must compute the same did not."""


@dataclass(eq=False)
class Workbench:
    """One shape's model on one device, with what a step needs."""

    model: Any
    device: torch.device
    dtype: torch.dtype
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    begun: list[torch.Tensor] = field(init=False)
    """What is trained, as it was before any step; on the host."""

    def __post_init__(self) -> None:
        """Note what is trained as it is now."""
        self.begun = [parameter.detach().cpu().clone() for parameter in self.parameters]

    def begin_again(self) -> None:
        """Make what is trained what it was before any step.

        A few hundred steps on one batch learn it by heart, and what is left of its gradient is rounding: arms that
        compute the same would seem to differ.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        with torch.no_grad():
            for parameter, begun in zip(self.parameters, self.begun, strict=True):
                parameter.copy_(begun)

    @classmethod
    def of(cls, config: Any, device: torch.device, *, nf4: bool = False) -> "Workbench":
        """A random model of this configuration with an adapter, and fused AdamW over what is trained."""
        register_wasteful()
        model = adapted_model(config, device, nf4=nf4)
        parameters = [p for p in model.parameters() if p.requires_grad]
        return cls(model, device, bench_dtype(device), torch.optim.AdamW(parameters, lr=1e-5, fused=True), parameters)

    @property
    def base(self) -> Any:
        """The Hugging Face model below peft."""
        return base_model(self.model)

    @property
    def layers(self) -> int:
        """Decoder layers, L."""
        return int(self.base.config.num_hidden_layers)

    def autocast(self) -> AbstractContextManager[Any]:
        """Half precision for what layers compute, as in the trainer."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, dtype=self.dtype)

    def set_recompute(self, recompute: bool) -> None:
        """Whether layers recompute their activations, for every arm alike."""
        restore(self.model)
        function = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        self.base._set_gradient_checkpointing(enable=recompute, gradient_checkpointing_func=function)


@dataclass(eq=False)
class PackedStep:
    """One arm's training step."""

    bench: Workbench
    install: Callable[[], None]
    """Give the model this arm's attention."""
    batch: Callable[[], dict[str, Any]]
    """A fresh batch for it: the model's keyword arguments, and ``labels``."""
    inputs: dict[str, Any] = field(default_factory=dict)
    loss: torch.Tensor | None = None

    def arm(self) -> Arm:
        """The step as the harness times it."""
        return Arm({FORWARD: self.forward, BACKWARD: self.backward, UPDATE: self.update}, self.prepare)

    def prepare(self) -> None:
        """Switch to this arm, run it once without gradients, and make a new batch."""
        self.loss = None
        self.install()
        self.inputs = self.batch()
        with torch.no_grad():
            self.logits()
        self.inputs = self.batch()

    def forward(self) -> None:
        """The mean loss of the batch's learned tokens."""
        labels = self.inputs["labels"]
        self.loss = summed_cross_entropy(self.logits(), labels) / learned_tokens(labels)

    def backward(self) -> None:
        """Gradients of everything trained."""
        assert self.loss is not None
        self.loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Clip, step, forget the gradients."""
        nn.utils.clip_grad_norm_(self.bench.parameters, 1.0)
        self.bench.optimizer.step()
        self.bench.optimizer.zero_grad(set_to_none=True)

    def logits(self) -> torch.Tensor:
        """[1, T, V]."""
        arguments = {name: value for name, value in self.inputs.items() if name != "labels"}
        with self.bench.autocast():
            logits: torch.Tensor = self.bench.model(**arguments, use_cache=False).logits
        return logits

    def counts(self) -> dict[str, int] | None:
        """How often the batch at hand had its boundaries and its structures built; None where nobody counts."""
        if (segments := self.inputs.get("segments")) is not None:
            return {METADATA: 1, "structures": sum(segments.builds.values())}
        if (row := self.inputs.get("packed_row")) is None:
            return None
        found = sum(count for key, count in row.builds.items() if key[0] == METADATA)
        return {METADATA: found, "structures": sum(row.builds.values()) - found}


@dataclass(eq=False)
class LayerCalls:
    """The first few decoder layers, called in turn as an arm's forward calls them, L calls in all: each on what the
    call before gave.

    One layer called over and over would find its objects in the host's caches, which a step's L layers don't. Where
    layers are recomputed, the backward through all calls is timed too: a rebuild inside it costs more than one in the
    forward, since the host has more to launch until the device is busy again.
    """

    step: PackedStep
    recompute: bool
    distinct: int = 4
    """How many layers are called in turn."""
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    """By layer: positional and keyword arguments of its call in the arm's forward."""
    last: torch.Tensor | None = None
    """What the last call gave, and with it the graph of all."""

    def arm(self) -> Arm:
        """The calls as the harness times them. Dropping the graphs of L layers takes the host long, and is nothing that
        a forward does before its backward: a part of its own."""
        middle = {LAYER_BACKWARD: self.backward} if self.recompute else {}
        return Arm({LAYER: self.run, **middle, "drop": self.drop}, self.prepare)

    def prepare(self) -> None:
        """Switch to the arm and see how its forward calls the layers."""
        self.calls.clear()
        hooks = [
            layer.register_forward_pre_hook(partial(self._keep, index), with_kwargs=True)
            for index, layer in enumerate(self._layers())
        ]
        try:
            self.step.prepare()
        finally:
            for hook in hooks:
                hook.remove()
        assert all(args for args, _ in self.calls.values()), "a layer was not called with its hidden states in place"

    def backward(self) -> None:
        """Back through all calls, each recomputed."""
        assert self.last is not None
        self.last.backward(torch.ones_like(self.last))  # type: ignore[no-untyped-call]

    def drop(self) -> None:
        """Forget graph and gradients."""
        self.last = None
        self.step.bench.optimizer.zero_grad(set_to_none=True)

    def run(self) -> None:
        """L calls, each with a graph behind it, as in training."""
        layers = self._layers()
        hidden = self.calls[0][0][0].detach().requires_grad_()
        with self.step.bench.autocast():
            for index in range(self.step.bench.layers):
                (_, *others), named = self.calls[index % len(layers)]
                out = layers[index % len(layers)](hidden, *others, **named)
                hidden = out[0] if isinstance(out, tuple) else out
        self.last = hidden

    def _layers(self) -> list[nn.Module]:
        return list(self.step.bench.base.get_decoder().layers[: self.distinct])

    def _keep(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls[index] = args, kwargs


@dataclass(frozen=True)
class Outcome:
    """What one step of an arm computed."""

    losses: torch.Tensor
    """float32: the cross-entropy of every learned token."""
    gradient: torch.Tensor
    """float32: all trained parameters' gradients, end to end."""
    builds: dict[str, int] | None

    @classmethod
    def of(cls, step: PackedStep) -> "Outcome":
        """Run one step of this arm without its update."""
        step.prepare()
        step.forward()
        step.backward()
        builds = step.counts()
        gradient = torch.cat([p.grad.flatten().float() for p in step.bench.parameters if p.grad is not None])
        step.bench.optimizer.zero_grad(set_to_none=True)
        step.inputs = step.batch()
        with torch.no_grad():
            losses = _token_losses(step.logits(), step.inputs["labels"])
        step.loss = None
        return cls(losses, gradient, builds)

    def distance(self, other: "Outcome") -> dict[str, float]:
        """How far the other's losses and gradient lie, relative to how much losses vary and to the gradient's norm."""
        spread = (other.losses - other.losses.mean()).norm()
        assert spread > 0
        assert self.gradient.shape == other.gradient.shape
        return {
            "token_losses": float((self.losses - other.losses).norm() / spread),
            "gradient": float((self.gradient - other.gradient).norm() / other.gradient.norm()),
        }


def prove_equal(steps: Mapping[str, PackedStep]) -> dict[str, dict[str, Any]]:
    """Run every arm once and compare each with the first; raises ``ResultsDifferError`` where they don't agree.

    Gives each arm's mean loss, its distance from the first arm, and what it built.
    """
    outcomes = {name: Outcome.of(step) for name, step in steps.items()}
    first, *_ = outcomes
    shown = {}
    for name, outcome in outcomes.items():
        limit = TOLERANCE[steps[name].bench.dtype]
        distance = outcome.distance(outcomes[first])
        if not all(value <= limit for value in distance.values()):  # a NaN differs too
            raise ResultsDifferError(f"{name} does not compute what {first} computes: {distance}, limit {limit}")
        shown[name] = {"loss": float(outcome.losses.mean()), "distance": distance, "builds": outcome.builds}
    return shown


def packed_steps(
    bench: Workbench, documents: Sequence[Mapping[str, Any]], tokens: int, choice: str, kinds: Sequence[Kind]
) -> dict[str, PackedStep]:
    """The arms by name: stock transformers first, then the references, ours last."""
    row = {name: value for name, value in PackedCollator(tokens=tokens)(documents).items() if name != "segments"}
    tensors = {name: value.to(bench.device) for name, value in row.items()}
    steps = {STOCK: PackedStep(bench, partial(_install, bench, "sdpa"), partial(dict, tensors))}
    for kind in kinds:
        install = partial(_install, bench, wasteful_key(choice, kind))
        steps[f"wasteful-{kind}"] = PackedStep(bench, install, partial(_wasteful_batch, tensors))
    ours = partial(_install_ours, bench, choice)
    steps[OURS] = PackedStep(bench, ours, partial(_segments_batch, tensors, [len(d["input_ids"]) for d in documents]))
    return steps


def _install(bench: Workbench, key: str) -> None:
    restore(bench.model)
    bench.base.set_attn_implementation(key)


def _install_ours(bench: Workbench, choice: str) -> None:
    # norms as stock's, since boundaries are what is measured
    apply(bench.model, Options(attention=choice, norms="model"))  # type: ignore[arg-type]  # one of the names Options takes


def _wasteful_batch(tensors: dict[str, Any]) -> dict[str, Any]:
    """Stock's batch, with a placeholder that stops transformers from making a mask, and the row for our references."""
    positions = tensors["position_ids"]
    return {**tensors, "attention_mask": mask_placeholder(positions.device), "packed_row": PackedRow(positions)}


def _segments_batch(tensors: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    """Stock's batch and segments, made on the host as the collator makes them; the step copies them."""
    segments = Segments.from_lengths(lengths)
    cuda = tensors["input_ids"].device.type == "cuda"
    return {**tensors, "segments": segments.pin_memory() if cuda else segments}


def _token_losses(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """float32 [learned tokens], a chunk of logits at a time."""
    pairs = zip(*(torch.split(x, LOSS_CHUNK) for x in (logits_BTV[0, :-1], labels_BT[0, 1:])), strict=True)
    losses = [
        F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="none") for logits, labels in pairs
    ]
    return torch.cat(losses)[labels_BT[0, 1:] != IGNORE]
