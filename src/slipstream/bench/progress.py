"""What a benchmark says while it works: which case of how many begins, and about how long is left.

Nothing is known of a device before it has worked, so the first case has no estimate of its own: its rounds have, as
soon as the first of them is done. After that, cases are taken to last as long as those before them did on average.
"""

import time
from collections.abc import Callable

import torch

Say = Callable[[str], None]
WORTH_TELLING = 5.0
"""Seconds below which nothing is said of the time left."""
NO_CARD = "no card here: small models on the CPU show that the benchmark works; their speeds say nothing about a card"


class Progress:
    """Counts the cases of one run of a benchmark."""

    def __init__(self, say: Say, cases: int, device: torch.device, now: Callable[[], float] = time.monotonic) -> None:
        self.say, self._cases, self._now = say, cases, now
        self._begun, self._start = 0, now()
        if device.type != "cuda":
            say(NO_CARD)

    def case(self, name: str) -> None:
        """Say that the next case begins."""
        done = self._begun
        self._begun += 1
        each = (self._now() - self._start) / done if done else 0.0
        left = each * (self._cases - done)
        told = f"; about {duration(left)} left" if left >= WORTH_TELLING else ""
        self.say(f"{self._begun} of {self._cases}: {name}{told}")

    def rounds(self, arms: int, rounds: int, seconds: float) -> None:
        """Say how long the rounds of this case take, when the first has taken ``seconds``; ``rounds`` are to come."""
        left = seconds * rounds
        if left >= WORTH_TELLING:
            self.say(f"  {arms} arms, {rounds} more rounds: about {duration(left)}")


def duration(seconds: float) -> str:
    """Roughly, in words."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
