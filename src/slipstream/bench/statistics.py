"""What a series of paired times says: a median, an interval, and whether a prediction holds.

Arms take turns, so a round's times share what the machine was doing then: differences are taken within a round before
anything is averaged. The interval is the percentile bootstrap of their median, which needs no distribution and shrugs
off the odd stalled step; the price is that with few rounds (under ten or so) it is somewhat too narrow. The
alternative, a t-interval of the mean, is wrong wherever one step in twenty takes twice as long. No torch here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True)
class Saving:
    """What one arm saves against another, in seconds, as a share, and as a gain: three words for one estimate.

    All come from the differences within a round. A ratio of the arms' medians would be a second estimate, which on a
    machine that drifts can have the other sign.
    """

    seconds: float
    """The other arm's median."""
    ours_seconds: float
    """This arm's median."""
    saved: Interval
    """Seconds."""
    share: Interval
    """Of the other arm's median; always below 1."""

    @property
    def gain(self) -> Interval:
        """How much more work a second does: share / (1 − share)."""
        return Interval(*(value / (1 - value) for value in (self.share.median, self.share.low, self.share.high)))

    @property
    def times_as_long(self) -> Interval:
        """This arm's time over the other's: 1 − share."""
        return Interval(1 - self.share.median, 1 - self.share.high, 1 - self.share.low)


def saving(slower: Sequence[float], faster: Sequence[float]) -> Saving:
    """What ``faster`` saves against ``slower``, round by round. Raises ``InputError`` for fewer than two rounds.

    The share's interval is that of median(slower − faster) / median(slower) over the same resamples, so that it
    contains 0 where that of the seconds does.
    """
    saved = bootstrap_interval(paired_differences(slower, faster))
    others = np.asarray(slower, dtype=np.float64)
    picks = _picks(others.size)
    differences = others - np.asarray(faster, dtype=np.float64)
    shares = np.median(differences[picks], axis=1) / np.median(others[picks], axis=1)
    low, high = np.quantile(shares, [0.025, 0.975])
    middle = float(np.median(others))
    share = Interval(saved.median / middle, float(low), float(high))
    return Saving(middle, float(np.median(faster)), saved, share)


def verdict_word(comparison: Mapping[str, Any]) -> str:
    """What a comparison of a result document says of its prediction; empty where nothing was predicted.

    ``noise``: the prediction is not refuted, but the interval contains 0, as it does where nothing at all is saved.
    """
    if comparison.get("holds") is None:
        return ""
    if not comparison["holds"]:
        return "off"
    return "noise" if comparison["saved_low"] <= 0 <= comparison["saved_high"] else "holds"


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
    medians = np.median(values[_picks(values.size, seed)], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(np.median(values)), float(low), float(high))


def _picks(size: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """The rounds of every resample, int64 [RESAMPLES, size]."""
    return np.random.default_rng(seed).integers(0, size, (RESAMPLES, size))
