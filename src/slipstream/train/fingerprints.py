"""What ``run.json`` tells of the things a run learned from and with: rows and base weights, by their fingerprints.

Older runs have none. They are told what can't be compared, and not refused: it is most likely the same. Alternative:
fingerprints taken now and written into their record, which would vouch for what nobody has seen.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.errors import InputError
from slipstream.model.base_weights import not_compared, other_weights
from slipstream.train.run_folder import RunFolder


def recorded_bases(run: Mapping[str, Any]) -> list[str]:
    """The names that a run's base model has had: as it was loaded last, and before it was moved."""
    changed = [entry["values"]["model"] for entry in run.get("changed", []) if "model" in entry["values"]]
    loaded = [run["base"]["name"]] if "base" in run else []
    return [*loaded, *(name for names in reversed(changed) for name in reversed(names))]


def recorded_digest(run: Mapping[str, Any]) -> str | None:
    """The fingerprint of the base model's weights; None for an older run, which lacks it."""
    digest: str | None = run.get("base", {}).get("digest")
    return digest


def recorded_contents(run: Mapping[str, Any], name: str = "train") -> str | None:
    """The fingerprint of all that a data set holds; None without the set, and for an older run."""
    content: str | None = run.get("contents", {}).get(name)
    return content


def not_recorded(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What there is to say of fingerprints that a run to be resumed has not recorded."""
    if recorded_contents(before) is None:
        yield "whether all rows are as they were can't be told: the run recorded their lengths and 64 of them"
    if before["recipe"].get("adapter", {}).get("kind") != "none" and recorded_digest(before) is None:
        yield not_compared(now["base"]["name"])


def refuse_other_things(folder: RunFolder, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ``InputError`` where rows or model are others than when the run in ``folder`` began: paths and names may
    be the same and what they name another.
    """
    remedy = "a resumed run must learn from the same things: bring {} back, or start another run with another output"
    if before["rows"]["train"] != now["rows"]["train"] or differ(recorded_contents(before), recorded_contents(now)):
        raise InputError(
            f"data.train holds other rows than when the run in '{folder.path}' began; {remedy.format('the rows')}"
        )
    total, was = now["parameters"]["total"], before["parameters"]["total"]
    if total != was:
        raise InputError(
            f"the model has {total:,} parameters, adapters included, and had {was:,} when the run in '{folder.path}' "
            f"began; {remedy.format('it')}"
        )
    was, is_now = recorded_digest(before), recorded_digest(now)
    if before["recipe"].get("adapter", {}).get("kind") != "none" and differ(was, is_now):
        assert was is not None
        assert is_now is not None
        raise InputError(f"the run in '{folder.path}' was trained on {other_weights(now['base']['name'], was, is_now)}")


def differ(before: str | None, now: str | None) -> bool:
    """Whether two fingerprints are there and not the same."""
    return before is not None and now is not None and before != now
