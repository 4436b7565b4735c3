"""The numbers a report shows, from a run's records, and how they are written.

Why: what a number means is decided here once, without HTML or figures, and is tested as arithmetic. Records may be
incomplete, so every number may be missing (None), never made up. Trade-off: the page repeats a name for each number.
Alternative: computing in the template, where no test looks.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.cost.sizes import size_text
from slipstream.train.records import Records, StepRecord


@dataclass(frozen=True, kw_only=True)
class KeyNumbers:
    """What a run came to. None where the records don't tell."""

    steps: int
    loss_first: float | None
    """The first step's, as it was: NaN or infinite too."""
    loss_last: float | None
    """The last step's, likewise."""
    eval_before: float | None
    eval_after: float | None
    tokens_per_second: float | None
    """Document tokens a second, the median over the steps, padding not counted."""
    peak_bytes: int | None
    packed: bool
    """Whether documents were packed, where the records tell."""
    fill: float | None
    """Share of the packed rows' tokens that are documents, between 0 and 1; None where not packed."""
    padding_share: float | None
    """Share of the tokens computed in the steps that were padding, between 0 and 1."""
    padding_factor: float | None
    """Tokens that padding would have computed, over those that packed rows compute; None where not packed."""
    seconds: float | None
    """Steps and evaluations together."""
    nonfinite: tuple[int, ...]
    """Steps whose loss was NaN or infinite."""

    @classmethod
    def of(cls, records: Records) -> "KeyNumbers":
        """The numbers of a run's records."""
        steps, packing = records.steps, section(records.run, "packing", "train")
        packed = packing.get("enabled") is not False
        before, after = _evaluations(records)
        speeds = [speed for speed in map(speed_of, steps) if math.isfinite(speed)]
        return cls(
            steps=steps[-1].step if steps else 0,
            loss_first=steps[0].loss if steps else None,
            loss_last=steps[-1].loss if steps else None,
            eval_before=before,
            eval_after=after,
            tokens_per_second=statistics.median(speeds) if speeds else None,
            peak_bytes=max((step.memory_bytes for step in steps if step.memory_bytes is not None), default=None),
            packed=packed,
            fill=number(packing.get("fill")) if packed else None,
            padding_share=_padding_share(steps),
            padding_factor=_padding_factor(packing) if packed else None,
            seconds=_duration(records),
            nonfinite=tuple(step.step for step in steps if not math.isfinite(step.loss)),
        )


def section(run: dict[str, Any], *path: str) -> dict[str, Any]:
    """The object at ``path``; empty where there is none."""
    here: Any = run
    for key in path:
        here = here.get(key) if isinstance(here, dict) else None
    return here if isinstance(here, dict) else {}


def number(value: Any) -> float | None:
    """``value`` if it is a finite number."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if known else None


def speed_of(step: StepRecord) -> float:
    """Document tokens a second; NaN where the time or the tokens are not known."""
    return step.tokens / step.seconds if step.seconds > 0 and step.tokens > 0 else math.nan


def _evaluations(records: Records) -> tuple[float | None, float | None]:
    """Loss before training and after it: what the run says, else the evaluation at step 0 and the last one."""
    before, after = number(records.run.get("eval_before")), number(records.run.get("eval_after"))
    first = next((item.loss for item in records.evals if item.step == 0), None)
    last = next((item.loss for item in reversed(records.evals) if item.step > 0), None)
    return (number(first) if before is None else before), (number(last) if after is None else after)


def _padding_factor(packing: dict[str, Any]) -> float | None:
    padded, tokens = number(packing.get("padded_tokens")), number(packing.get("tokens"))
    padding = number(packing.get("padding_tokens"))
    if padded is None or tokens is None or padding is None or tokens + padding <= 0:
        return None
    return padded / (tokens + padding)


def _padding_share(steps: Sequence[StepRecord]) -> float | None:
    padding = sum(step.padding_tokens for step in steps)
    computed = padding + sum(step.tokens for step in steps)
    return padding / computed if computed > 0 else None


def _duration(records: Records) -> float | None:
    """What steps and evaluations took: the time between start and end would count the pause before a resume.

    Evaluations without the steps around them are no training's time.
    """
    known = [step.seconds for step in records.steps] + [evaluation.seconds for evaluation in records.evals]
    counted = [seconds for seconds in known if math.isfinite(seconds) and seconds >= 0]
    return sum(counted) if counted and records.steps else None


# -------------------------------------------------------------------------------------------------------------- written


def loss_text(value: float | None) -> str:
    """E.g. ``1.842``."""
    return "–" if value is None else f"{value:.3f}"


def count_text(value: float | None) -> str:
    """E.g. ``12,345``."""
    return "–" if value is None else f"{value:,.0f}"


def amount_text(value: float | None, what: str) -> str:
    """E.g. ``1 row``, ``12,345 rows``."""
    return f"{count_text(value)} {what}{'' if value == 1 else 's'}"


def percent_text(share: float | None) -> str:
    """E.g. ``99.2%``; never rounded up to 100%."""
    if share is None:
        return "–"
    return f"{math.floor(share * 1000) / 10:.1f}%" if 0.99 < share < 1 else f"{share:.1%}"


def bytes_text(value: float | None) -> str:
    """E.g. ``43.1 GiB``."""
    return "–" if value is None else size_text(value)


def time_text(seconds: float | None) -> str:
    """E.g. ``4 min 12 s``."""
    if seconds is None:
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60:,} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {rest:02} s"


def binned(x: Sequence[float], y: Sequence[float], most: int = 600) -> tuple[list[float], list[float]]:
    """At most ``most`` points: means of neighbours, NaN where a group holds no finite value."""
    size = max(1, math.ceil(len(x) / most))
    groups = [slice(at, at + size) for at in range(0, len(x), size)]
    return [statistics.fmean(x[group]) for group in groups], [_mean(y[group]) for group in groups]


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Means over each value's neighbours, up to ``reach`` on both sides; as many before as after, except at the end.

    Nothing lags, and the start isn't flattened. Values that are not finite are passed over, and stay NaN themselves.
    """
    result = []
    for at, value in enumerate(values):
        near = min(reach, at)
        result.append(_mean(values[at - near : at + near + 1]) if math.isfinite(value) else math.nan)
    return result


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan
