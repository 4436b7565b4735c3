"""A step that runs out of memory with reloads ahead is begun again with one buffer, as if nothing had happened."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloading import IDS, LAYERS, Offloaded, assert_same_bits, deep, loss_of, offloaded
from packed import gradients
from slipstream.memory.held import Held
from slipstream.step import second_try
from slipstream.step.captured import RecordingMemoryError
from slipstream.step.step import Step
from slipstream.train.train_step import circumstances

BATCH = {"input_ids": IDS}
OTHER = IDS.flip(1)


def dropping() -> Any:
    """Its layers draw random numbers, which a step begun again must draw once more."""
    return deep(attention_dropout=0.3).train()


def step_of(model: Any) -> Step:
    about = circumstances(model, dtype=torch.float32)
    return Step(model, lambda batch: loss_of(model, batch["input_ids"]), list(model.parameters()), about, "eager")


def one_step(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    step_of(model)(BATCH, 1.0)
    return gradients(model)


def known(monkeypatch: pytest.MonkeyPatch, made: Offloaded) -> None:
    """Have the step find an offload that ``apply`` would not install on a CPU."""
    found = SimpleNamespace(checkpointing=SimpleNamespace(offload=made.offload))
    monkeypatch.setattr(second_try, "applied", lambda model: found)


class Scarce:
    """Inputs can't be had on these calls: the forward takes ``LAYERS``, the backward as many again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failing: int) -> None:
        self.calls, real = 0, Held.take

        def take(held: Held) -> torch.Tensor:
            self.calls += 1
            if self.calls in failing:
                raise torch.OutOfMemoryError("out of memory")
            return real(held)

        monkeypatch.setattr(Held, "take", take)


@pytest.mark.parametrize("at", [2, LAYERS + 1, LAYERS + 3, 2 * LAYERS])
def test_a_step_out_of_memory_is_begun_again_with_one_buffer(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """In the forward, or in the backward when some layers have their gradients already."""
    model = dropping()
    with offloaded(model, buffers=3):
        expected = one_step(model)
    model = dropping()
    with offloaded(model, buffers=3) as made:
        known(monkeypatch, made)
        scarce = Scarce(monkeypatch, at)
        assert_same_bits(one_step(model), expected)
        assert scarce.calls == at + 2 * LAYERS
        assert made.lane.most == made.lane.depth == 1
        assert [(note.name, note.on) for note in made.notes] == [("reload buffers", False)]
        assert "out of memory for another reload buffer on cpu; 1 left" in made.notes[0].reason
        reloads = made.lane.reloads
        model.zero_grad()
        assert_same_bits(one_step(model), expected)
        assert made.lane.reloads == reloads + LAYERS - 1
        assert made.lane.ahead == 0


def test_random_state_matters_here() -> None:
    """Else the test above would pass without putting it back."""
    model = dropping()
    with offloaded(model):
        first = one_step(model)
        model.zero_grad()
        step_of(model)(BATCH, 1.0)
    assert any(not torch.equal(first[name], found) for name, found in gradients(model).items())


def test_a_second_failure_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dropping()
    with offloaded(model, buffers=2) as made:
        known(monkeypatch, made)
        scarce = Scarce(monkeypatch, LAYERS + 1, 2 * LAYERS + 2)
        with pytest.raises(torch.OutOfMemoryError):
            one_step(model)
        assert scarce.calls == 2 * LAYERS + 2


def test_with_one_buffer_nothing_would_be_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dropping()
    with offloaded(model, buffers=1) as made:
        known(monkeypatch, made)
        scarce = Scarce(monkeypatch, LAYERS + 1)
        with pytest.raises(torch.OutOfMemoryError):
            one_step(model)
        assert scarce.calls == LAYERS + 1


def two_batches(model: Any, whole: bool = False) -> dict[str, torch.Tensor]:
    """The second adds to the gradients of the first."""
    torch.manual_seed(5)
    step = step_of(model)
    step._about = replace(step._about, whole=whole)
    step(BATCH, 2.0)
    step({"input_ids": OTHER}, 2.0)
    return gradients(model)


def test_earlier_batches_gradients_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dropping()
    with offloaded(model, buffers=3):
        one_step(model)
        alone = gradients(model)
        model.zero_grad()
        expected = two_batches(model)
    assert any(not torch.equal(expected[name], gradient) for name, gradient in alone.items())
    model = dropping()
    with offloaded(model, buffers=3) as made:
        known(monkeypatch, made)
        scarce = Scarce(monkeypatch, 3 * LAYERS + 3)  # in the second's backward, when some layers have added theirs
        found = two_batches(model)
        assert scarce.calls == 3 * LAYERS + 3 + 2 * LAYERS
        for name, gradient in expected.items():  # sums of a weight that is used twice have another order
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
        assert made.lane.most == 1


@pytest.mark.parametrize("hindrance", ["gradients", "processes"])
def test_what_can_not_be_undone_is_an_error_and_the_next_step_has_one_buffer(
    monkeypatch: pytest.MonkeyPatch, hindrance: str
) -> None:
    """Gradients of all weights of earlier batches, to which a failed backward has added, and processes waiting."""
    model = dropping()
    with offloaded(model, buffers=2) as made:
        known(monkeypatch, made)
        if hindrance == "processes":
            monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
            monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
            failing, run = LAYERS + 1, one_step
        else:
            failing, run = 3 * LAYERS + 1, partial(two_batches, whole=True)
        scarce = Scarce(monkeypatch, failing)
        with pytest.raises(torch.OutOfMemoryError):
            run(model)
        assert scarce.calls == failing
        assert made.lane.most == 1


class Recording:
    """A captured step that runs out of memory while it is recorded."""

    def __init__(self, failures: int) -> None:
        self.failures, self.calls = failures, 0

    def __call__(self, batch: Any, learned: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls <= self.failures:
            raise RecordingMemoryError("out of memory while recording")
        return torch.zeros(())


@pytest.mark.parametrize("failures", [1, 2])
def test_a_recording_is_begun_again_once(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    model = dropping()
    with offloaded(model, buffers=2) as made:
        one_step(model)  # so that its device is known
        known(monkeypatch, made)
        step = step_of(model)
        step._captured = Recording(failures)  # type: ignore[assignment]
        if failures == 1:
            step(BATCH, 1.0)
        else:
            with pytest.raises(RecordingMemoryError):
                step(BATCH, 1.0)
        assert step._captured.calls == 2
        assert made.lane.most == 1
