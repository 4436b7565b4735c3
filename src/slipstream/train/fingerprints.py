"""What ``run.json`` tells of the things a run learned from and with: rows and base weights, by their fingerprints.

Older runs have none. They are told what can't be compared, and not refused: it is most likely the same. Alternative:
fingerprints taken now and written into their record, which would vouch for what nobody has seen.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.model.base_weights import not_compared


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
