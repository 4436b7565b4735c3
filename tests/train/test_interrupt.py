"""Ctrl-C and SIGTERM: the step at hand is finished and saved, and the run goes on as if nothing had been."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerControl

from slipstream.train.checkpoint import last_checkpoint
from slipstream.train.interrupt import StopRequest
from training import trainer_of, weights

SIGNALS = [signal.SIGINT, signal.SIGTERM]


class SignalInStep(TrainerCallback):
    """Sends this process a signal while a step is at work."""

    def __init__(self, step: int, number: signal.Signals, times: int = 1) -> None:
        self.step, self.number, self.times = step, number, times

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step - 1:
            for _time in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(("number", "accumulate"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_run_interrupted_and_resumed_ends_with_the_same_weights(
    tmp_path: Path, number: signal.Signals, accumulate: int
) -> None:
    settings: dict[str, Any] = {
        "max_steps": 5,
        "gradient_accumulation_steps": accumulate,
        "save_strategy": "steps",
        "save_steps": 2**31,
    }
    straight = trainer_of(tmp_path / "straight", **settings)
    straight.train()
    stop, folder = StopRequest(), tmp_path / "interrupted"
    broken = trainer_of(folder, callbacks=[stop, SignalInStep(2, number)], **settings)
    with stop.listening():
        broken.train()
    assert stop.signal is number
    assert broken.state.global_step == 2
    checkpoint = last_checkpoint(folder)
    assert checkpoint.name == "checkpoint-2"
    resumed = trainer_of(folder, callbacks=[StopRequest()], **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 5
    expected, found = weights(straight.model), weights(resumed.model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(not torch.equal(weights(broken.model)[name], expected[name]) for name in expected)


def test_a_second_signal_means_it(tmp_path: Path) -> None:
    stop = StopRequest()
    trainer = trainer_of(tmp_path, callbacks=[stop, SignalInStep(1, signal.SIGINT, times=2)])
    with pytest.raises(KeyboardInterrupt), stop.listening():
        trainer.train()
    assert trainer.state.global_step == 0
    assert signal.getsignal(signal.SIGINT) is not stop._ask


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    stop = StopRequest()
    with stop.listening():
        assert [signal.getsignal(number) for number in SIGNALS] == [stop._ask] * 2
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with pytest.raises(ZeroDivisionError), stop.listening():
        _ = 1 / 0
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_without_a_signal_nothing_is_asked() -> None:
    control: Any = TrainerControl()
    args: Any = None
    StopRequest().on_step_end(args, args, control)
    assert not control.should_save
    assert not control.should_training_stop
