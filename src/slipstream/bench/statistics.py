"""What a series of paired times says: a median, an interval, and whether a prediction holds.

Arms take turns, so a round's times share what the machine was doing then: differences are taken within a round before
anything is averaged. The interval is the percentile bootstrap of their median, which needs no distribution and shrugs
off the odd stalled step; the price is that with few rounds (under ten or so) it is somewhat too narrow. The
alternative, a t-interval of the mean, is wrong wherever one step in twenty takes twice as long. No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.errors import InputError

RESAMPLES = 2000
TOLERANCE = 0.2
"""How far a prediction may lie from the interval's middle, as a share of it, and still hold."""


@dataclass(frozen=True)
class Interval:
    """A median and its bootstrap interval."""

    median: float
    low: float
    high: float

    @property
    def middle(self) -> float:
        """The point halfway between the ends."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Verdict:
    """A prediction beside its measurement, in one unit."""

    predicted: float
    measured: Interval

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured.median / self.predicted if self.predicted else None

    @property
    def holds(self) -> bool:
        """Whether the prediction lies in the interval, or within 20% of its middle."""
        inside = self.measured.low <= self.predicted <= self.measured.high
        middle = self.measured.middle
        return inside or abs(self.predicted - middle) <= TOLERANCE * abs(middle)


def paired_differences(slower: Sequence[float], faster: Sequence[float]) -> list[float]:
    """``slower - faster``, round by round."""
    return [a - b for a, b in zip(slower, faster, strict=True)]


def bootstrap_interval(differences: Sequence[float], level: float = 0.95, seed: int = 0) -> Interval:
    """The median of ``differences`` and the percentile bootstrap interval of it at this confidence level.

    Raises ``InputError`` for fewer than two differences, which say nothing about their spread.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.size < 2:
        raise InputError(f"{values.size} round(s) give no interval; ask for at least 2")
    picks = np.random.default_rng(seed).integers(0, values.size, (RESAMPLES, values.size))
    medians = np.median(values[picks], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(np.median(values)), float(low), float(high))
