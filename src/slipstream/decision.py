"""``Decision``: what was switched on or off, and why. Printed, planned and recorded; nothing is switched silently."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """One optimisation, on or off, with its reason in one sentence."""

    name: str
    """What was decided, e.g. ``"attention"``."""
    on: bool
    """Whether the optimisation is active."""
    reason: str
    """One sentence: the choice taken and why."""

    def __str__(self) -> str:
        return f"{self.name}: {'on' if self.on else 'off'} ({self.reason})"
