"""Whether the speed-ups change what is learned: the same training, run in every mode and without Slipstream.

A speed-up may not cost quality, and a loss curve that looks alike proves nothing. So each arm trains the same adapters
on the same documents in the same order, which digests in its result show, and differences stand beside the spread that
is there without us: between ways of rounding the same step (``modes``), between two seeds of plain peft
(``adapters``). The alternative, scores of a benchmark suite, is coarser than either and needs models this can't hold.

    1. read    ``read``         rows → documents → packed rows, every tenth document held out
    2. arms    ``MODES``, ``ADAPTERS``   name → what the arm does otherwise
    3. train   ``trained``      one arm: model, adapter, trainer, losses, first gradient, held-out losses
"""

import gc
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from slipstream.bench.known_shapes import SHAPES
from slipstream.bench.learning_arms import Arm, Watch, ours, plain
from slipstream.bench.shapes import shape_config
from slipstream.data.packing import pack_dataset
from slipstream.data.rows import DataOptions
from slipstream.data.tokens import tokenise
from slipstream.errors import InputError
from slipstream.model.load import LoadOptions, load_model, load_tokenizer
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.train.options import TrainOptions

HELD_OUT = 10
"""One document in so many is held out."""
MODES: Mapping[str, Arm] = MappingProxyType(
    {
        "eager": Arm(mode="eager"),
        "eager-float32": Arm(mode="eager", exact=True),
        "eager-again": Arm(mode="eager"),
        "eager-recompute": Arm(mode="eager", activations="recompute"),
        "eager-masked": Arm(mode="eager", attention="sdpa"),
        "eager-peft": Arm(mode="eager", adapters="peft"),
        "compiled": Arm(mode="compiled"),
        "captured": Arm(mode="captured"),
    }
)
"""One step's arithmetic, run in several ways; the first is what the others are compared with."""
ADAPTERS: Mapping[str, Arm] = MappingProxyType(
    {
        "slipstream": Arm(),
        "peft": Arm(slipstream=False, adapters="peft"),
        "peft-seed-1": Arm(slipstream=False, adapters="peft", seed=1),
        "float32": Arm(slipstream=False, adapters="float32"),
    }
)
PARTS: Mapping[str, Mapping[str, Arm]] = MappingProxyType({"modes": MODES, "adapters": ADAPTERS})


@dataclass(frozen=True, kw_only=True)
class Learning:
    """What is trained, in every arm alike."""

    model: str
    """A shape's name (random weights), a model folder or a GGUF file."""
    data: str
    """A file of rows in any form that ``data.train`` of a recipe takes."""
    device: torch.device
    dtype: torch.dtype
    """Of the frozen weights, and what layers compute in."""
    fields: dict[str, str] = field(default_factory=dict)
    """The data's names of fields, as in a recipe."""
    tokens: int = 2048
    """Tokens of a packed row; one row a step."""
    steps: int = 50
    every: int = 50
    """Steps between evaluations."""
    learning_rate: float = TrainOptions.learning_rate

    def __post_init__(self) -> None:
        """Refuse what can't be trained before anything is read."""
        for name in ("steps", "every"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)} < 1: nothing would be measured; raise it")
        if not Path(self.data).exists():
            raise InputError(f"--data {self.data}: no such file; give a JSON or JSONL file of rows")
        if self.model not in SHAPES and not Path(self.model).exists():
            raise InputError(
                f"--model {self.model}: neither a file or folder nor a shape; the shapes are {', '.join(SHAPES)}"
            )

    def facts(self) -> dict[str, Any]:
        """What a result says of it; names instead of this machine's paths."""
        return {
            "model": Path(self.model).name,
            "data": Path(self.data).name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "tokens": self.tokens,
            "steps": self.steps,
            "learning_rate": self.learning_rate,
        }


@dataclass(frozen=True)
class Material:
    """Packed rows to train on, and held-out ones."""

    rows: Any
    held_out: Any
    counts: dict[str, int]


def read(bench: Learning, byte_tokenizer: Callable[[], Any]) -> Material:
    """Tokenise the file as training does and pack its documents; every tenth is held out.

    ``byte_tokenizer`` makes the tokenizer of shapes, which have none. Raises ``InputError``.
    """
    tokenizer = byte_tokenizer() if bench.model in SHAPES else load_tokenizer(bench.model, LoadOptions())
    options = DataOptions(train=bench.data, fields=bench.fields, overlong="truncate", bad_rows="skip")
    documents = tokenise(bench.data, options, tokenizer, max_length=bench.tokens).documents
    if len(documents) < HELD_OUT:
        raise InputError(f"{bench.data}: {len(documents)} documents < {HELD_OUT}: none would be held out; give more")
    held = range(HELD_OUT - 1, len(documents), HELD_OUT)
    learned = [index for index in range(len(documents)) if index % HELD_OUT != HELD_OUT - 1]
    parts = [documents.select(indices) for indices in (learned, held)]
    rows, held_out = (pack_dataset(part, bench.tokens) for part in parts)
    counts = {"documents": len(learned), "rows": len(rows), "held_out_documents": len(held)}
    return Material(rows, held_out, counts)


def trained(
    bench: Learning, material: Material, arm: Arm, *, held_out: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Train one arm: its result, plain values for JSON, and the first step's gradient before clipping (float32, CPU).

    ``held_out``: evaluate before, every ``bench.every`` steps and at the end. Raises ``InputError`` for an arm that
    this device or model can't have.
    """
    if arm.exact and bench.dtype == torch.float32:
        raise InputError("every arm computes in float32")
    model, dtype = add_adapter(base_model(bench), AdapterOptions(rank=16, alpha=16), seed=arm.seed), bench.dtype
    if arm.exact:  # not before: peft rounds first weights to the base's dtype
        model, dtype = model.float(), torch.float32
    if dtype == torch.float32:  # the one attention there that can be recorded: all arms have the same
        arm = replace(arm, attention="sdpa")
    start, watch, began = _digest(_trained(model)), Watch(), time.perf_counter()
    options = TrainOptions(
        mode=arm.mode,
        steps=bench.steps,
        learning_rate=bench.learning_rate,
        seed=arm.seed,
        eval_every=bench.every if held_out else None,
    )
    evaluated = material.held_out if held_out else None
    with tempfile.TemporaryDirectory() as scratch:
        make = ours if arm.slipstream else plain
        trainer = make(model, arm, options, bench.tokens, dtype, material.rows, evaluated, watch, Path(scratch))
        if held_out:
            trainer.evaluate()
        trainer.train()
        if held_out and bench.steps not in watch.held_out:
            trainer.evaluate()
    result = {
        "ran": watch.ran,
        "arm_seconds": round(time.perf_counter() - began, 1),
        "start": start,
        "order": _digest(watch.rows),
        "losses": [float(loss) for loss in watch.losses],
        **({"held_out": {str(step): loss for step, loss in watch.held_out.items()}} if held_out else {}),
        "decisions": watch.decisions,
    }
    gradient = watch.gradient
    del model, trainer, watch
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return result, gradient


def base_model(bench: Learning) -> Any:
    """The model without an adapter, on its device; a shape's random weights are the same at every call."""
    if bench.model not in SHAPES:
        name: Any = str(bench.dtype).removeprefix("torch.")
        return load_model(bench.model, LoadOptions(dtype=name), device=bench.device)
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), bench.device:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(shape_config(bench.model), dtype=bench.dtype)


def distance(gradient: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> float:
    """|g - r| / |r| over all parameters together, in float64. Both name the same ones."""
    assert gradient.keys() == reference.keys()
    apart = sum(float((gradient[name].double() - reference[name].double()).square().sum()) for name in reference)
    size = sum(float(value.double().square().sum()) for value in reference.values())
    assert size > 0, "the first step had no gradient"
    return float((apart / size) ** 0.5)


def _trained(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    """A short name for tensors' contents, in their order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
