from collections import Counter

import pytest
import torch

from slipstream.bench.harness import WHOLE, Arm, HostClock, clock_for, measure
from slipstream.errors import InputError


class Ticks:
    """A clock that counts what arms say they cost."""

    def __init__(self) -> None:
        self.now = 0.0
        self.marks: list[float] = []

    def start(self) -> None:
        self.marks = [self.now]

    def mark(self) -> None:
        self.marks.append(self.now)

    def seconds(self) -> list[float]:
        return [end - begin for begin, end in zip(self.marks[:-1], self.marks[1:], strict=True)]


class Job:
    """Arms that tell a clock what they cost, and remember in which order they ran."""

    def __init__(self) -> None:
        self.clock = Ticks()
        self.ran: list[str] = []

    def cost(self, name: str, seconds: float):
        def run() -> None:
            self.ran.append(name)
            self.clock.now += seconds

        return run


def test_arms_take_turns_in_rotating_order() -> None:
    job = Job()
    arms = {name: Arm({"run": job.cost(name, 1.0)}) for name in "abc"}
    measure(arms, rounds=3, warmup=0, clock=job.clock)
    assert "".join(job.ran) == "abcbcacab"


def test_parts_are_timed_one_by_one_and_summed() -> None:
    job = Job()
    arms = {
        "slow": Arm({"forward": job.cost("f", 2.0), "backward": job.cost("b", 5.0)}, job.cost("prepare", 100.0)),
        "fast": Arm({"forward": job.cost("g", 1.0)}),
    }
    times = measure(arms, rounds=2, warmup=1, clock=job.clock)
    assert times == {
        "slow": {"forward": [2.0, 2.0], "backward": [5.0, 5.0], WHOLE: [7.0, 7.0]},
        "fast": {"forward": [1.0, 1.0], WHOLE: [1.0, 1.0]},
    }
    assert Counter(job.ran) == {"f": 3, "b": 3, "prepare": 3, "g": 3}


def test_fewer_than_two_rounds_are_refused() -> None:
    with pytest.raises(InputError, match="rounds 1 < 2"):
        measure({"a": Arm({})}, rounds=1, warmup=0, clock=Ticks())


def test_an_arm_that_fails_leaves_the_collector_on() -> None:
    import gc

    def fails() -> None:
        assert not gc.isenabled()
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        measure({"a": Arm({"run": fails})}, rounds=2, warmup=0, clock=Ticks())
    assert gc.isenabled()


def test_host_clock_times_work_on_the_cpu() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    clock.start()
    sum(range(100_000))
    clock.mark()
    clock.mark()
    work, nothing = clock.seconds()
    assert work > nothing >= 0
