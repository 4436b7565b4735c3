"""What a benchmark says of its progress: cases counted, the time left, and that a CPU proves nothing about cards."""

import torch

from slipstream.bench.harness import Arm, HostClock, measure
from slipstream.bench.progress import NO_CARD, Progress, duration

CARD = torch.device("cuda")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_left_is_that_of_the_cases_before() -> None:
    said: list[str] = []
    clock = Clock()
    progress = Progress(said.append, 3, CARD, clock)
    progress.case("a")
    clock.now = 60.0
    progress.case("b")
    clock.now = 160.0
    progress.case("c")
    assert said == ["1 of 3: a", "2 of 3: b; about 2 min left", "3 of 3: c; about 80 s left"]


def test_the_first_round_tells_of_the_others() -> None:
    said: list[str] = []
    progress = Progress(said.append, 1, CARD)
    progress.rounds(4, 20, 2.0)
    progress.rounds(4, 20, 0.01)
    assert said == ["  4 arms, 20 more rounds: about 40 s"]

    class Told(Progress):
        def rounds(self, arms: int, rounds: int, seconds: float) -> None:
            said.append(f"{arms} {rounds} {seconds > 0}")

    measure({"a": Arm({}), "b": Arm({})}, 3, 1, HostClock(), Told(said.append, 1, CARD))
    assert said[1:] == ["2 3 True"]


def test_without_a_card_nothing_is_claimed() -> None:
    said: list[str] = []
    Progress(said.append, 1, torch.device("cpu"))
    assert said == [NO_CARD]


def test_durations_in_words() -> None:
    assert [duration(value) for value in (0.2, 75.4, 200.0, 6000.0)] == ["1 s", "75 s", "3 min", "1.7 h"]
