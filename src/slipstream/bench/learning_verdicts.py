"""What the arms of ``bench.learning`` say together: differences, the spread beside them, and a verdict.

``modes``. Every way of a step rounds differently, and the question is whether ours differ more than others that are as
exact. Eager steps may repeat bit for bit, so a second eager run would allow nothing; two yardsticks stand in its place,
each of the largest and the mean difference of losses over the steps and of the first gradient:

- *spread*: the largest deviation from eager among other eager ways of the same arithmetic: run again; activations
  recomputed; attention by the masked product in place of the variable-length kernel (both exact, other order of sums);
  adapters by peft's own forward (the same products, rounded once more). They round little differently, all norms and
  activations as eager does, so this is the strict one (``within_spread``).
- *rounding*: how far eager is from the same weights computed in float32, which is its own error. A way no less exact
  than eager lies within that of the exact value, hence within twice that of eager; one further away rounds worse.

A mode is ``within`` where it deviates by no more than the larger of spread and twice the rounding. ``from_float32`` is
its own mean error beside eager's. In float32 there is hardly any rounding to hide behind: the bar is 1e-6 of the value
(or the spread, should that be larger).

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
EXACT = "eager-float32"
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
    if "eager" not in arms:
        return []
    found = {name: _deviation(name, arm, "eager", arms["eager"]) for name, arm in arms.items() if name != "eager"}
    spread = _largest([one for name, one in found.items() if name.startswith("eager-") and name != EXACT])
    smallest = min(map(abs, arms["eager"]["losses"]))
    least = FLOAT32_BAR if row["dtype"] == "float32" else 0.0
    strict = {name: max(spread[name], least * (1.0 if name == "gradient" else smallest)) for name in MEASURES}
    rounding = _largest([found[EXACT]] if EXACT in found else [])
    allowed = {name: max(strict[name], 2 * rounding[name]) for name in MEASURES}
    for name, one in found.items():
        if EXACT in found:
            one["from_float32"] = _deviation(name, arms[name], EXACT, arms[EXACT])["mean"]
        if not name.startswith("eager-"):
            one |= {f"allowed_{measure}": allowed[measure] for measure in MEASURES}
            one["within"] = one["ran"] == name and _none_above(one, allowed)
            one["within_spread"] = one["ran"] == name and _none_above(one, strict)
    return list(found.values())


def _largest(ways: list[Row]) -> dict[str, float]:
    return {measure: max((one[measure] for one in ways), default=0.0) for measure in MEASURES}


def _none_above(one: Row, allowed: Mapping[str, float]) -> bool:
    return all(one[measure] <= allowed[measure] for measure in MEASURES)


def _deviation(name: str, arm: Row, against: str, other: Row) -> Row:
    """Differences of losses in nats, over all steps, and of the first gradient relative to the other's."""
    assert _alike(arm, other), f"{name} did not learn the same rows from the same weights as {against}"
    apart = [abs(a - b) for a, b in zip(arm["losses"], other["losses"], strict=True)]
    gradient = arm["gradient_distance"][against]
    return {
        "arm": name,
        "against": against,
        "ran": arm["ran"],
        "largest": max(apart),
        "mean": sum(apart) / len(apart),
        "gradient": gradient,
        "bitwise": not any(apart) and gradient == 0.0,
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
