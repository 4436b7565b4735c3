"""Nothing is built twice: one mask a batch for each distinct (device, dtype, window), whatever the layers."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from packed import FAMILIES, LENGTHS, WINDOWS, documents, logits_of, model_of, row_of, scaled, with_adapter
from slipstream import Options, apply
from slipstream.train.loss import summed_cross_entropy
from training import trainer_of

CPU = torch.device("cpu")


def masks(windows: set[int | None], dtype: torch.dtype = torch.float32) -> Counter[Any]:
    return Counter({("mask", CPU, dtype, window): 1 for window in windows})


def counting(model: Any) -> Counter[str]:
    """How often a projection inside the layers runs: twice a step under checkpointing."""
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name.endswith("o_proj"):
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    return calls


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_build_in_forward_and_backward(family: str, activations: Any) -> None:
    """Alternating windows make two structures, not one a layer (unsloth's report of masks rebuilt in each)."""
    model = apply(with_adapter(model_of(family)), Options(activations=activations)).train()
    calls, row = counting(model), row_of(documents())
    loss = summed_cross_entropy(logits_of(model, row), row["labels"])
    assert row["segments"].builds == masks(WINDOWS[family])
    loss.backward()
    assert set(calls.values()) == {2 if activations == "recompute" else 1}  # the recompute did run
    assert row["segments"].builds == masks(WINDOWS[family])
    assert row["segments"].copies == Counter()


def test_a_second_forward_of_the_same_batch_builds_nothing() -> None:
    model, row = apply(model_of("qwen2")), row_of(documents())
    for _ in range(3):
        logits_of(model, row)
    assert row["segments"].builds == masks(WINDOWS["qwen2"])


@pytest.mark.parametrize(("window", "kept"), [(max(LENGTHS) - 1, True), (max(LENGTHS), False), (1000, False)])
def test_a_window_no_shorter_than_every_document_is_none(window: int, kept: bool) -> None:
    model, row = apply(model_of("qwen2", sliding_window=window)), row_of(documents())
    logits_of(model, row)
    assert row["segments"].builds == masks({None, window} if kept else {None})


def test_another_dtype_is_another_structure() -> None:
    model, row = apply(model_of("llama")), row_of(documents())
    logits_of(model, row)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_of(model, row)
    assert row["segments"].builds == masks({None}) + masks({None}, torch.bfloat16)


def test_each_batch_has_its_own() -> None:
    model, first, second = apply(model_of("llama")), row_of(documents()), row_of(documents((20, 20)))
    logits_of(model, first)
    logits_of(model, second)
    assert first["segments"].builds == second["segments"].builds == masks({None})


class ReadBacks(TorchDispatchMode):
    """Counts the operations by which the host asks a device for a value, and waits; on the CPU they are called too."""

    ASKING = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select", "aten.unique")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(function).startswith(self.ASKING)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", [*FAMILIES, "dynamic", "longrope"])
def test_no_value_is_read_back(family: str) -> None:
    """transformers#39213: no copy to the host in any layer, in the first step or a later one, forward or backward."""
    overrides = {} if family in FAMILIES else scaled(family)
    model = model_of(family if family in FAMILIES else "llama", **overrides)
    apply(model, Options(activations="recompute"))
    for lengths in (LENGTHS, (20, 20)):
        row = row_of(documents(lengths))
        with ReadBacks() as reading:
            logits_of(model, row).sum().backward()
        assert reading.count == 0


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_the_trainers_loss_reads_nothing_back(activations: Any, tmp_path: Path) -> None:
    """From batch to gradients through ``Trainer.compute_loss``: chunks of logits, counts, division."""
    model = apply(with_adapter(model_of("qwen3")), Options(activations=activations))
    trainer = trainer_of(tmp_path, model)
    assert trainer.batch_loss.head is not None
    row = row_of(documents())
    with ReadBacks() as reading:
        trainer.compute_loss(model.train(), row).backward()
        trainer.compute_loss(model, row, num_items_in_batch=torch.tensor(7)).backward()
    assert reading.count == 0
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_the_count_of_values_read_back_sees_them() -> None:
    row = row_of(documents())
    with ReadBacks() as reading:  # transformers' own dynamic scaling asks for the longest position
        model_of("llama", **scaled("dynamic"))(input_ids=row["input_ids"], position_ids=row["position_ids"])
    assert reading.count > 0
    with ReadBacks() as reading:
        assert torch.ones(2).nonzero().any()
    assert reading.count == 2
