"""The arms of ``bench all``: one model, on which each optimisation can be switched on and off by itself.

Everything is applied once; what an arm's ``prepare`` switches, untimed, are names and numbers: the attention's and the
experts' function in the model's config, the reload buffers, the way the step runs. Inputs of all layers but the last
wait on the host in every arm, from one pool of pinned memory.

Switched off, boundaries and structures are made again in every layer (``wasteful.py``), one buffer reloads an input
when it is needed, experts look their tokens up one by one (``experts_reference.py``), and the step is eager. A step
whose host waits in each layer can't be recorded, so that by itself the step's optimisation is compiled layers.
"""

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from transformers.integrations.moe import ExpertsInterface

from slipstream.bench.experts_arms import STEP_LIMIT
from slipstream.bench.experts_reference import WHERE, where_experts
from slipstream.bench.harness import Arm
from slipstream.bench.packing_arms import TOLERANCE, ResultsDifferError
from slipstream.bench.shapes import adapted_model, bench_dtype, random_documents
from slipstream.bench.wasteful import METADATA, PackedRow, register_wasteful, wasteful_key
from slipstream.cost.offload import Split
from slipstream.decision import Decision
from slipstream.device.feed import PackedCollator
from slipstream.device.segments import Segments
from slipstream.memory.checkpointing import restore_checkpointing, set_checkpointing
from slipstream.memory.host_budget import host_budget
from slipstream.memory.offload import Offload
from slipstream.model.attention import AttentionChoice, mask_placeholder
from slipstream.model.experts import ExpertsForward
from slipstream.model.experts_choice import Named, experts_key
from slipstream.step.choice import Circumstances, Mode, capture_obstacle, compile_obstacle
from slipstream.step.step import Step
from slipstream.train.circumstances import circumstances
from slipstream.train.forward import BatchLoss
from slipstream.train.loss import learned_tokens
from slipstream.transform import ATTRIBUTE, Applied, Options, applied, apply, base_model, restore

OFF, PACKING, RELOAD, EXPERTS, STEP, PUBLISHED, ALL = "off", "packing", "reload", "experts", "step", "published", "all"
GRADIENTS, UPDATE = "gradients", "update"
KIND: Literal["vectorised"] = "vectorised"
"""The reference that packing is measured against: the faster one."""
LOSS_LIMIT = 0.01
"""How far two arms' mean losses may lie apart, relative to one of them."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """Which optimisations an arm has."""

    packing: bool = False
    """Boundaries and structures once a batch, or in every layer."""
    reload: bool = False
    """Inputs reloaded ahead, or when they are needed."""
    experts: Literal["where", "sorted", "best"] = "where"
    """Looked up one by one; one sort and a loop, as published; or what ``auto`` takes here."""
    step: Literal["eager", "compiled", "best"] = "eager"


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        OFF: Way(),
        PACKING: Way(packing=True),
        RELOAD: Way(reload=True),
        EXPERTS: Way(experts="sorted"),
        STEP: Way(step="compiled"),
        PUBLISHED: Way(packing=True, reload=True, experts="sorted"),
        ALL: Way(packing=True, reload=True, experts="best", step="best"),
    }
)


@dataclass(eq=False)
class Bench:
    """One shape's model and row on one device, ready for every arm; ``close`` it."""

    model: Any
    device: torch.device
    dtype: torch.dtype
    optimizer: torch.optim.Optimizer
    parameters: list[torch.nn.Parameter]
    tensors: dict[str, torch.Tensor]
    lengths: list[int]
    loss: BatchLoss
    offload: Offload
    best: Mode
    steps: dict[Mode, Step]
    uncompiled: str | None = None
    """Why layers can't be compiled here, if they can't."""
    notes: list[Decision] = field(default_factory=list)
    """What turned out otherwise than planned."""

    @classmethod
    def of(cls, config: Any, tokens: int, attention: AttentionChoice, device: torch.device) -> "Bench":
        """A random model with an adapter, everything applied; fused AdamW over what is trained."""
        model, dtype = adapted_model(config, device), bench_dtype(device)
        apply(model, Options(attention=attention, activations="keep", norms="model", compute_dtype=dtype))
        notes: list[Decision] = []
        offload = _offload_inputs(model, notes)
        register_wasteful(outside_graphs=True)
        outside: ExpertsForward = torch.compiler.disable(where_experts)  # type: ignore[no-untyped-call]
        ExpertsInterface.register(WHERE, outside)
        loss = BatchLoss(model, partial(_autocast, dtype))
        parameters = [p for p in model.parameters() if p.requires_grad]
        about = circumstances(model, dtype=dtype)
        best, steps = _steps(model, loss, parameters, about, dtype)
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        tensors, lengths = _row(tokens, min(40_000, base_model(model).config.vocab_size), device)
        made = (model, device, dtype, optimizer, parameters, tensors, lengths, loss, offload, best, steps)
        return cls(*made, uncompiled=compile_obstacle(about), notes=notes)

    @property
    def base(self) -> Any:
        """The Hugging Face model below peft."""
        return base_model(self.model)

    @property
    def fitted(self) -> Applied:
        """What hangs on the model."""
        found = applied(self.model)
        assert found is not None
        return found

    @property
    def experts(self) -> Named | None:
        """The experts function that ``auto`` takes here; None for a dense model."""
        return None if self.fitted.experts is None else self.fitted.experts.choice

    def arms(self) -> dict[str, "TogetherStep"]:
        """The arms that apply."""
        return {name: TogetherStep(self, way) for name, way in WAYS.items() if name not in self.left_out()}

    def left_out(self) -> dict[str, str]:
        """The arms that don't apply, with the reason."""
        absent = {EXPERTS: "a dense model has no experts"} if self.experts is None else {}
        return absent if self.uncompiled is None else {**absent, STEP: self.uncompiled}

    def mode(self, way: Way) -> Mode:
        """How an arm's step is run."""
        return self.best if way.step == "best" else way.step

    def install(self, way: Way) -> None:
        """Switch the model to an arm."""
        choice, key = self.fitted.attention, self.fitted.forward.attention
        assert choice is not None
        self.base.set_attn_implementation(key if way.packing else wasteful_key(choice, KIND))
        self.offload.set_buffers("auto" if way.reload else 1)
        self.loss.compiled = self.mode(way) != "eager"
        if self.experts is not None:
            names = {"where": WHERE, "sorted": experts_key("loop"), "best": experts_key(self.experts)}
            self.base.set_experts_implementation(names[way.experts])

    def batch(self, way: Way) -> dict[str, Any]:
        """A fresh batch: segments as the collator makes them on the host, or what a framework without them has."""
        if way.packing:
            segments = Segments.from_lengths(self.lengths)
            return {**self.tensors, "segments": segments.pin_memory() if self.device.type == "cuda" else segments}
        positions = self.tensors["position_ids"]
        row = {"attention_mask": mask_placeholder(self.device), "packed_row": PackedRow(positions), "use_cache": False}
        return {**self.tensors, **row}

    def fallbacks(self) -> list[Decision]:
        """The modes that turned out not to work here."""
        changed = [step for mode, step in self.steps.items() if step.mode != mode]
        return [decision for step in changed for decision in step.decisions if decision.name == "step"]

    def close(self) -> None:
        """Leave the model as it was, without gradients, and give graphs and memory back."""
        for step in self.steps.values():
            step.close()
        self.optimizer.zero_grad(set_to_none=True)
        restore(self.model)
        gc.collect()


def _offload_inputs(model: Any, notes: list[Decision]) -> Offload:
    """Have all layers recomputed and all inputs but the last wait on the host, also where the host is the device."""
    base, found = base_model(model), applied(model)
    assert found is not None
    restore_checkpointing(found.checkpointing)
    layers = int(base.config.num_hidden_layers)
    offload = Offload(layers=layers - 1, buffers=1, host=host_budget(None), strict=True, decide=notes.append)
    contexts = None if found.experts is None else found.experts.kept.contexts
    made = set_checkpointing(base, Split(0, 1, layers - 1), decide=notes.append, offload=offload, context_fn=contexts)
    setattr(base, ATTRIBUTE, replace(found, checkpointing=made))  # so that restore undoes it
    return offload


def _steps(
    model: Any, loss: BatchLoss, parameters: list[torch.nn.Parameter], about: Circumstances, dtype: torch.dtype
) -> tuple[Mode, dict[Mode, Step]]:
    """The best mode here, and a step for each mode; the best is made first, so that the adapters are its own."""
    modes: list[Mode] = [] if compile_obstacle(about) else ["compiled"]
    modes = [*([] if capture_obstacle(about) else ["captured"]), *modes, "eager"]  # type: ignore[list-item]
    summed = partial(_summed, loss, model)
    return modes[0], {mode: Step(model, summed, parameters, about, mode, dtype=dtype) for mode in modes}


def _summed(loss: BatchLoss, model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    return loss(model, batch)[0]


def _row(tokens: int, vocabulary: int, device: torch.device) -> tuple[dict[str, torch.Tensor], list[int]]:
    documents = random_documents(tokens, vocabulary)
    row = PackedCollator(tokens=tokens)(documents)
    tensors = {name: value.to(device) for name, value in row.items() if name != "segments"}
    return tensors, [len(one["input_ids"]) for one in documents]


def _autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """Half precision for what layers compute, as in the trainer."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


@dataclass(eq=False)
class TogetherStep:
    """One arm's training step."""

    bench: Bench
    way: Way
    batch: dict[str, Any] = field(default_factory=dict)
    loss: torch.Tensor | None = None

    @property
    def step(self) -> Step:
        """What runs it; its mode is what it fell back to where the one meant failed."""
        return self.bench.steps[self.bench.mode(self.way)]

    def arm(self) -> Arm:
        """The step as the harness times it."""
        return Arm({GRADIENTS: self.gradients, UPDATE: self.update}, self.prepare)

    def prepare(self) -> None:
        """Switch to this arm and make a new batch."""
        self.loss = None
        self.bench.install(self.way)
        self.batch = self.bench.batch(self.way)

    def gradients(self) -> None:
        """Forward and backward; boundaries made on the host are copied here."""
        batch = dict(self.batch)
        if "segments" in batch:
            batch["segments"] = batch["segments"].on(self.bench.device)
        self.loss = self.step(batch, learned_tokens(batch["labels"]))

    def update(self) -> None:
        """Clip, step, forget the gradients."""
        torch.nn.utils.clip_grad_norm_(self.bench.parameters, 1.0)
        self.bench.optimizer.step()
        self.bench.optimizer.zero_grad(set_to_none=True)

    def boundaries(self) -> int:
        """How often the batch at hand had its boundaries made."""
        row: PackedRow | None = self.batch.get("packed_row")
        return 1 if row is None else sum(count for key, count in row.builds.items() if key[0] == METADATA)


@dataclass(frozen=True)
class Outcome:
    """What one step of an arm computed, and how."""

    loss: float
    gradient: torch.Tensor
    """float32: all trained parameters' gradients, end to end."""
    boundaries: int
    reloads: int
    buffers: int
    ran: Mode

    @classmethod
    def of(cls, step: TogetherStep) -> "Outcome":
        """Run one step of this arm without its update."""
        bench = step.bench
        before = sum(lane.reloads for lane in bench.offload.lanes.values())
        step.prepare()
        step.gradients()
        assert step.loss is not None
        gradient = torch.cat([p.grad.flatten().float() for p in bench.parameters if p.grad is not None])
        bench.optimizer.zero_grad(set_to_none=True)
        (lane,) = bench.offload.lanes.values()
        found = cls(float(step.loss), gradient, step.boundaries(), lane.reloads - before, lane.depth, step.step.mode)
        step.loss = None
        return found


def prove_equal(steps: dict[str, TogetherStep]) -> dict[str, dict[str, Any]]:
    """Run every arm once and compare each with ``off``; raises ``ResultsDifferError`` where they don't agree.

    The last arm runs first: its recording must meet nothing that another arm left behind. In half precision rounding
    decides near-ties between experts otherwise, hence a wide limit for gradients of mixtures (see ``experts_arms``).
    """
    outcomes = {name: Outcome.of(steps[name]) for name in reversed(steps)}
    bench = steps[OFF].bench
    _assert_switched(steps, outcomes)
    limit = (TOLERANCE if bench.experts is None else STEP_LIMIT)[bench.dtype]
    first, shown = outcomes[OFF], {}
    for name in steps:
        found = outcomes[name]
        distance = float((found.gradient - first.gradient).norm() / first.gradient.norm())
        apart = abs(found.loss / first.loss - 1)
        if not (distance <= limit and apart <= LOSS_LIMIT):  # a NaN differs too
            raise ResultsDifferError(
                f"{name} does not compute what {OFF} computes: losses {found.loss:.6f} and {first.loss:.6f}, gradients "
                f"{distance:.1e} apart, limit {limit:.1e}"
            )
        shown[name] = {
            "ran": found.ran,
            "loss": found.loss,
            "distance": distance,
            "boundaries": found.boundaries,
            "buffers": found.buffers,
        }
    return shown


def _assert_switched(steps: Mapping[str, TogetherStep], outcomes: Mapping[str, Outcome]) -> None:
    """That an arm without an optimisation really went without it."""
    layers = int(steps[OFF].bench.base.config.num_hidden_layers)
    for name, step in steps.items():
        assert outcomes[name].reloads >= layers - 1, f"{name} reloaded {outcomes[name].reloads} inputs"
        assert step.way.reload or outcomes[name].buffers == 1
        assert step.way.packing or outcomes[name].boundaries >= 2 * layers, f"{name} kept its boundaries"
