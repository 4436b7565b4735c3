"""What the arms of ``bench.learning`` say together: differences, the spread beside them, and a verdict.

``modes``. Every way of a step rounds differently; the question is whether ours differ more than others that are as
exact. Eager steps may repeat bit for bit, so a second eager run alone would allow nothing. The spread is therefore the
largest deviation from eager among *other eager ways of the same arithmetic*: run again; activations recomputed;
attention by the masked product in place of the variable-length kernel (both exact, other order of sums); adapters by
peft's own forward (the same products, rounded once more). Compiled and captured are ``within`` where their losses
(largest and mean difference over the steps) and their first gradient deviate no more than that. In float32 there is
hardly any rounding to hide behind: the bar there is 1e-6 of the value (or the spread, should that be larger).

``adapters``. Slipstream's default beside plain peft from the same first weights and rows: the final held-out losses may
differ by no more than those of two seeds of plain peft, and by 0.5% from adapters computed in float32. Arms count only
where digests show that weights and rows were the same (and other ones for the second seed).
"""

from collections.abc import Mapping
from typing import Any

from slipstream.errors import InputError

FLOAT32_BAR = 1e-6
"""Relative difference allowed between modes in float32."""
ADAPTERS_BAR = 0.005
"""Relative difference allowed of the final held-out loss from adapters computed in float32."""
MEASURES = ("largest", "mean", "gradient")
Row = dict[str, Any]


def compared(row: Row) -> Row:
    """The row with ``comparisons`` made anew from its arms; arms still missing are left out of them."""
    compare = _modes if row["part"] == "modes" else _adapters
    arms = {name: arm for name, arm in row["arms"].items() if "refused" not in arm}
    return {**row, "comparisons": compare(row, arms)}


def verdicts(row: Row) -> dict[str, bool]:
    """Each comparison with a verdict, by name."""
    found = [comparison for comparison in row["comparisons"] if "within" in comparison]
    return {f"{one['arm']} against {one['against']}": one["within"] for one in found}


def merged(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of several processes as one: the arms of each part together, compared anew. Raises ``InputError``."""
    first = documents[0]
    for other in documents:
        for key in ("benchmark", "device", "versions", "commit"):
            if other.get(key) != first.get(key):
                raise InputError(
                    f"--merge: {key} is {first.get(key)!r} in one result and {other.get(key)!r} in another; merge "
                    f"results of one machine and commit"
                )
    rows: dict[str, Row] = {}
    for row in (row for document in documents for row in document["rows"]):
        before = rows.setdefault(row["part"], {**row, "arms": {}})
        if (facts := _other_facts(before, row)) is not None:
            raise InputError(f"--merge: {row['part']} with {facts}; merge results of the same training")
        if doubled := before["arms"].keys() & row["arms"].keys():
            raise InputError(f"--merge: {', '.join(sorted(doubled))} is in two results; give each arm once")
        before["arms"] |= row["arms"]
    commands = dict.fromkeys(document["command"] for document in documents)
    return {**first, "command": "; ".join(commands), "rows": [compared(row) for row in rows.values()]}


def _other_facts(one: Row, other: Row) -> str | None:
    for key in one.keys() | other.keys():
        if key not in ("arms", "comparisons") and one.get(key) != other.get(key):
            return f"{key} {one.get(key)!r} and {other.get(key)!r}"
    return None


# ------------------------------------------------------------------------------------------------ modes


def _modes(row: Row, arms: Mapping[str, Row]) -> list[Row]:
    eager = arms.get("eager")
    if eager is None:
        return []
    found = [_deviation(name, arm, eager) for name, arm in arms.items() if name != "eager"]
    for one in found:
        assert one["comparable"], f"{one['arm']} did not learn the same rows from the same weights"
    ways = [one for one in found if one["arm"].startswith("eager-")]
    spread: dict[str, float] = {name: max((one[name] for one in ways), default=0.0) for name in MEASURES}
    scale = {"largest": min(map(abs, eager["losses"])), "mean": min(map(abs, eager["losses"])), "gradient": 1.0}
    for one in (one for one in found if one not in ways):
        least = FLOAT32_BAR if row["dtype"] == "float32" else 0.0
        allowed = {name: max(spread[name], least * scale[name]) for name in MEASURES}
        one |= {f"allowed_{name}": allowed[name] for name in MEASURES}
        one["within"] = one["ran"] == one["arm"] and all(one[name] <= allowed[name] for name in MEASURES)
    return found


def _deviation(name: str, arm: Row, eager: Row) -> Row:
    """Differences of losses in nats, over all steps, and of the first gradient relative to eager's."""
    apart = [abs(a - b) for a, b in zip(arm["losses"], eager["losses"], strict=True)]
    return {
        "arm": name,
        "against": "eager",
        "ran": arm["ran"],
        "largest": max(apart),
        "mean": sum(apart) / len(apart),
        "gradient": arm["gradient_distance"],
        "bitwise": not any(apart) and arm["gradient_distance"] == 0.0,
        "comparable": _alike(arm, eager),
    }


def _alike(one: Row, other: Row) -> bool:
    """Whether two arms began with the same adapter and learned the same rows in the same order."""
    return bool(one["start"] == other["start"] and one["order"] == other["order"])


# ------------------------------------------------------------------------------------------------ adapters


def _adapters(row: Row, arms: Mapping[str, Row]) -> list[Row]:
    found = []
    if {"slipstream", "peft"} <= arms.keys():
        found.append(_final("slipstream", "peft", arms))
    if {"peft", "peft-seed-1"} <= arms.keys():
        found.append(_final("peft-seed-1", "peft", arms))
    if {"slipstream", "peft", "peft-seed-1"} <= arms.keys():
        ours, seeds = found
        assert not seeds["comparable"], "the second seed trained the same as the first"
        ours["allowed"] = abs(seeds["difference"])
        ours["within"] = ours["comparable"] and abs(ours["difference"]) <= ours["allowed"]
    if {"slipstream", "float32"} <= arms.keys():
        exact = _final("slipstream", "float32", arms)
        exact["allowed"] = ADAPTERS_BAR * final(arms["float32"])
        exact["within"] = exact["comparable"] and abs(exact["difference"]) <= exact["allowed"]
        found.append(exact)
    return found


def final(arm: Row) -> float:
    """The held-out loss after the last step, in nats a learned token."""
    return float(arm["held_out"][max(arm["held_out"], key=int)])


def _final(name: str, against: str, arms: Mapping[str, Row]) -> Row:
    one, other = arms[name], arms[against]
    both = one["held_out"].keys() & other["held_out"].keys()
    difference = final(one) - final(other)
    return {
        "arm": name,
        "against": against,
        "difference": difference,
        "relative": difference / final(other),
        "largest_on_the_way": max(abs(one["held_out"][step] - other["held_out"][step]) for step in both),
        "comparable": _alike(one, other),
    }
