"""Any result as tables: arms with their medians, comparisons in one form for all benchmarks, and what else it holds.

Nothing is known about single benchmarks but a few words: new files appear by themselves.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from page_numbers import heading, percent, scalar, seconds
from slipstream.bench.statistics import verdict_word
from slipstream.generated_page import markdown_table

PARTS = ("arms", "modes", "comparisons")
"""What a row of a result may hold that takes a table of its own."""
LONGEST_TABLE = 40
"""Rows of a table; a result with more is summed up in its file."""
OF_OURS = "slipstream"
"""The arm of comparisons that name only the other one."""
HIDDEN = ("dtype", "mixture")
Row = Mapping[str, Any]


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Rows with arms, modes or comparisons each with tables of their own, the others together."""
    scaling = [row for row in rows if row.get("part") == "scaling"]
    if scaling:
        yield scaling_table(scaling)
    for row in rows:
        if row.get("part") != "scaling" and any(key in row for key in PARTS):
            yield from row_tables(row)
    plain = [{**flat(row), **_whole(row)} for row in rows if not any(key in row for key in PARTS)]
    if plain:
        yield from plain_tables(plain)


def _whole(row: Row) -> dict[str, Any]:
    """A single step's seconds, of a row that holds them by part."""
    parts = row.get("seconds")
    return {"step_seconds": parts["whole"]} if isinstance(parts, dict) and "whole" in parts else {}


def row_tables(row: Row) -> Iterator[str]:
    """One case: its facts, its arms, and what they say against each other."""
    yield f"{facts(row)}.\n"
    for key in ("arms", "modes"):
        if isinstance(row.get(key), dict):
            yield table_of([{"": name, **arm_cells(name, arm)} for name, arm in row[key].items()])
    if row.get("comparisons"):
        yield comparisons_table(row["comparisons"])
    for name, reason in row.get("left_out", {}).items():
        yield f"Left out: {name}, {reason}.\n"


def facts(row: Row) -> str:
    """What tells a case from others, in a line."""
    shown = {key: value for key, value in row.items() if is_scalar(value) and value is not None and key not in HIDDEN}
    if isinstance(shown.get("recompute"), bool):
        shown["activations"] = "recomputed" if shown.pop("recompute") else "kept"
    told = [f"{heading(key)} {scalar(key, value)}" for key, value in shown.items()]
    return ", ".join(told)


# ------------------------------------------------------------------------------------------------ comparisons


def comparisons_table(comparisons: Sequence[Row]) -> str:
    """Arm against arm: what is saved within a round, its interval, the gain that follows, and the prediction."""
    columns = {
        "arm": [str(one.get("arm") or one.get("ours") or OF_OURS) for one in comparisons],
        "against": [str(one.get("against", "–")) for one in comparisons],
        "part": [str(one.get("part", "whole")) for one in comparisons],
        "saved": [seconds(one.get("saved_seconds")) for one in comparisons],
        "95% interval": [_interval(one) for one in comparisons],
        "gain": [gain_told(one) for one in comparisons],
        "gain, interval": [_gain_interval(one) for one in comparisons],
        "predicted": [seconds(one.get("predicted_seconds")) for one in comparisons],
        "saved / predicted": [_of_predicted(one) for one in comparisons],
        "prediction": [verdict_word(one) or "–" for one in comparisons],
        "published": [str(one.get("published") or "–") for one in comparisons],
        "product of parts": [scalar("gain", one.get("product_gain")) for one in comparisons],
    }
    shown = {name: cells for name, cells in columns.items() if any(cell != "–" for cell in cells)}
    return markdown_table(list(shown), list(zip(*shown.values(), strict=True)))


def gain_of(one: Row) -> float | None:
    """How much more work a second does, by the same estimate as what is saved: saved / (reference − saved).

    Where the file holds a gain with an interval of its own, that; where it holds no seconds, its gain or its ratio
    (of offload's comparisons: this arm's time over the other's).
    """
    if "gain_low" in one:
        return float(one["gain"])
    reference = one.get("against_seconds") or (one.get("seconds") if "ours_seconds" in one else None)
    if reference and one.get("saved_seconds") is not None:
        return float(one["saved_seconds"] / (reference - one["saved_seconds"]))
    if "gain" in one:
        return float(one["gain"])
    if one.get("ratio") is None:
        return None
    return 1 / one["ratio"] - 1 if "arm" in one else one["ratio"] - 1


def gain_told(one: Row) -> str:
    """The gain in words; *noise* where its interval, or that of what is saved, contains 0."""
    gain = gain_of(one)
    low, high = (one.get("gain_low", one.get("saved_low")), one.get("gain_high", one.get("saved_high")))
    noise = low is not None and high is not None and low <= 0 <= high
    return "–" if gain is None else f"{percent(gain)}{' (noise)' if noise else ''}"


def _interval(one: Row) -> str:
    return f"{seconds(one['saved_low'])} to {seconds(one['saved_high'])}" if "saved_low" in one else "–"


def _gain_interval(one: Row) -> str:
    return f"{percent(one['gain_low'])} to {percent(one['gain_high'])}" if "gain_low" in one else "–"


def _of_predicted(one: Row) -> str:
    predicted, saved = one.get("predicted_seconds"), one.get("saved_seconds")
    return scalar("ratio", saved / predicted) if predicted and saved is not None else "–"


# ------------------------------------------------------------------------------------------------ arms and plain rows


def scaling_table(rows: Sequence[Row]) -> str:
    """Routing alone: one line for each number of experts."""
    arms = list(rows[0]["arms"])
    head = ["experts", *(f"{arm}: {what}" for arm in arms for what in ("time", "host asks the device"))]
    lines = []
    for row in rows:
        cells = [(seconds(row["arms"][arm]["seconds"]), str(row["arms"][arm]["queries"])) for arm in arms]
        lines.append([str(row["experts"]), *(cell for pair in cells for cell in pair)])
    told = facts({key: rows[0].get(key) for key in ("part", "tokens", "top_k", "rounds")})
    return f"{told}.\n\n{markdown_table(head, lines)}"


def arm_cells(name: str, arm: Any) -> dict[str, Any]:
    """An arm's scalars, with the median of every series of seconds."""
    if not isinstance(arm, dict):
        return {"": arm}
    found = arm.get("seconds")
    series = found if isinstance(found, dict) else {"": found}
    medians = {f"{part}_seconds" if part else "step_seconds": median(values) for part, values in series.items()}
    shown = {**{key: value for key, value in flat(arm).items() if key != "seconds"}, **medians}
    if "ran" in shown and "saved_low" in shown and not shown["saved_seconds"]:  # the first mode, against itself
        shown |= dict.fromkeys(("saved_seconds", "saved_low", "saved_high"))
    if shown.get("ran") not in (None, name) and "decisions" in arm:
        shown["ran"] = f"{shown['ran']}: {_why(arm['decisions'])}"
    return shown


def _why(decisions: Sequence[str]) -> str:
    """Why a step ran in another mode than asked for, without a library's error and advice: the file has these."""
    told = next((str(one) for one in decisions if str(one).startswith("step: ")), "")
    reason = told.partition("compiled: ")[2] or told.partition("eager: ")[2]
    return (reason.partition(": ")[0] or "no reason recorded").rstrip(")")


def plain_tables(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows in one table; what is the same in all of them stands before it."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    same = [key for key in keys if len(rows) > 1 and len({repr(row.get(key)) for row in rows}) == 1]
    if told := facts({key: rows[0][key] for key in same if rows[0].get(key) is not None}):
        yield f"{told}.\n"
    yield table_of([{key: value for key, value in row.items() if key not in same} for row in rows])


def named(values: Row) -> Iterator[str]:
    """A table of named mappings, and its lone numbers in a line."""
    mappings = {name: flat(value) for name, value in values.items() if isinstance(value, dict)}
    if mappings:
        yield table_of([{"": name, **value} for name, value in mappings.items()])
    if lone := {name: value for name, value in values.items() if is_scalar(value)}:
        yield ", ".join(f"{heading(name)}: {scalar(name, value)}" for name, value in lone.items()) + ".\n"


def processes(result: Row) -> Iterator[str]:
    """A run of several counts of processes: what was run, and a line for each count."""
    yield f"{facts({key: value for key, value in result['summary'].items() if key != 'device'})}.\n"
    lines = []
    for run in result.get("runs", ()):
        exposed = run.get("exposed_communication_ms") or {}
        peaks = {key: max(run[key]) for key in ("device_peak_gb", "host_peak_gb") if run.get(key)}
        told = {key: value for key, value in flat(run).items() if key not in ("device", "cuda", "error")}
        failed = {"failed": str(run["error"]).strip().splitlines()[-1][:200]} if run.get("error") else {}
        lines.append({**told, **{f"exposed, {how}_ms": value for how, value in exposed.items()}, **peaks, **failed})
    yield table_of(lines)


def table_of(rows: Sequence[Row]) -> str:
    """Every key that any row has a value for, as a column."""
    keys = list(dict.fromkeys(key for row in rows for key, value in row.items() if value is not None))
    if not keys:
        return ""
    shown = rows[:LONGEST_TABLE]
    more = f"\n{len(rows) - len(shown):,} more rows are in the file.\n" if len(rows) > len(shown) else ""
    cells = [[scalar(key, row.get(key)) for key in keys] for row in shown]
    return markdown_table([heading(key) for key in keys], cells) + more


def median(values: Any) -> float | None:
    """Of a list of numbers, or of one."""
    numbers = values if isinstance(values, list) else [values]
    return statistics.median(numbers) if numbers and all(isinstance(n, int | float) for n in numbers) else None


def flat(values: Row) -> dict[str, Any]:
    """The scalars of a mapping; those of mappings inside it are left to its file."""
    return {key: value for key, value in values.items() if is_scalar(value)}


def is_scalar(value: Any) -> bool:
    """What a cell can hold."""
    return value is None or isinstance(value, str | int | float)
