"""``docs/benchmarks.md`` from ``benchmarks/results/*.json``: every number there comes from a file here.

    python benchmarks/page.py            writes the page
    python benchmarks/page.py --check    fails where writing would change it

Little is known about single benchmarks: a result's rows become tables of whatever they hold (``page_results.py``), and
a key's ending gives its unit (``page_numbers.py``). New files therefore appear by themselves. Written down are the
published figures and which of our rows stand beside them (``page_published.py``), what columns mean (``LEGENDS``), and
how to see what a result lacks (``page_missing.py``).
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from page_missing import again, arms_again, missing, option
from page_numbers import percent, scalar
from page_published import published, rows_of
from page_results import named, processes, tables
from slipstream.generated_page import markdown_table, page_command

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
Results = Mapping[str, Mapping[str, Any]]
INTRODUCTION = """# Benchmarks

Generated from `benchmarks/results/*.json` by `python benchmarks/page.py`; every file says on which device, with which
versions, at which commit and by which command it was made.

How to read the tables. Arms take turns in one process, in rounds. An arm's own times are medians over its rounds.
*Saved* is the median of the differences within a round, its interval a 95% bootstrap interval (with two rounds: what
they span). *Gain* is how much more work a second does, and follows from what is saved: saved / (time of the other arm −
saved). On a machine whose speed drifts, two arms' own medians can lie the other way round: then believe *saved*, and
only as far as its interval says. A *prediction* holds where it lies in the interval, or within 20% of its middle; else
it is off; *noise*: the interval contains 0, so that nothing at all may have been saved or lost.
"""
LEGENDS = {
    "all": "*off*: boundaries made in every layer, one reload buffer, experts looked up one by one, an eager step. The "
    "other arms switch on what they are named after; *published* the three published changes, *all* everything. "
    "*product of parts*: the gain that the parts alone would multiply to. *distance*: of the gradients, relative to "
    "their length; in half precision rounding decides near-ties between a mixture's experts otherwise, so that there "
    "it is large (that routes agree is shown in float32, by tests).",
    "experts": "*where-loop* looks up each expert's tokens (the published baseline), *sorted-loop* sorts once (the "
    "published change), *grouped* multiplies all experts at once; *transformers-* are that library's own experts.",
    "offload": "*offload-1* and *offload-2* reload layer inputs with one buffer and with two, *offload-auto* with what "
    "is chosen here; *recompute* keeps the inputs on the device. Rows that were tried under a cap with fewer layers "
    "than the model has: the cap is a card's less the weights of the layers left out, whose inputs lie on the host.",
    "packing": "*stock* is transformers with position ids; *wasteful-* makes boundaries and structures again in every "
    "layer (*loop* as published, *vectorised* as fast as that can be); *slipstream* makes them once a batch. The "
    "prediction is of what a rebuild adds to one layer, measured beside the steps.",
    "step": "*floor*: the time that the step's products with the weights take at the rate measured on this device, its "
    "share of the step in the table. A mode that could not be had ran another, with the reason. *Saved* is against "
    "the first mode.",
    "scaling": "Several processes, one a device, each with the same number of full rows. *exposed*: communication "
    "under which nothing was computed; *against silent ranks*, by another run without communication, it is below 0 "
    "where that run was the slower one. *scaling*: tokens a second of each process, over those of the smallest count.",
    "train_step": "Whole trainers, each in a process of its own, timed by the same callback; medians of steps after "
    "the warm-up, and of rounds. *ratio*: tokens a second of the first arm over this arm's.",
}
"""What a benchmark's arms and columns are."""
ABOVE = {"plan": "Plan against run", "learning": "What is learned"}
"""Benchmarks whose figures stand together, with errors and verdicts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it; gives the exit code."""
    return page_command(str(__doc__), PAGE, "benchmarks/page.py", lambda: page(read_results(RESULTS)), arguments)


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Every result document by its file's name without the ending."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def page(results: Results) -> str:
    """The whole page."""
    parts = [INTRODUCTION, published(results), plans(results), learning(results)]
    for name, before in zip(results, [None, *results], strict=False):
        known = before is not None and benchmark_of(before, results) == benchmark_of(name, results)
        parts.append(section(name, results, legend=not known))
    return "\n".join(part.rstrip() + "\n" for part in parts if part)


# ------------------------------------------------------------------------------------------------ plan against run


def plans(results: Results) -> str:
    """Predictions of ``slipstream plan`` beside runs, with their errors; bars: memory 10%, a captured step 20%."""
    rows = [
        [
            name,
            _commit(row, result),
            row["shape"],
            f"{row['layers']}",
            f"{row['tokens']:,}",
            row["choices"],
            *_errors(row),
        ]
        for name, result in results.items()
        if result.get("benchmark") == "plan"
        for row in result["rows"]
        if again(results, name, row) is None
    ]
    if not rows:
        return ""
    head = ["file", "commit", "model", "layers", "tokens", "choices"]
    head += ["memory: predicted", "measured", "error", "step: predicted", "measured", "error"]
    words = (
        "Predictions of the commit measured; `tests/cost/test_plan_against_run.py` makes today's for the same jobs.\n"
    )
    return "\n".join(["## Plan against run\n", words, markdown_table(head, rows)])


def _commit(row: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """The commit that a row was measured at, which may be another than its file's."""
    return str(row.get("commit", result.get("commit", "–")))[:7]


def _errors(row: Mapping[str, Any]) -> list[str]:
    cells = []
    for key in ("bytes", "seconds"):
        predicted, measured = row[f"predicted_{key}"], row[f"measured_{key}"]
        error = "–" if not measured else percent(predicted / measured - 1, 0)
        cells += [scalar(key, predicted), scalar(key, measured), error]
    return cells


# ------------------------------------------------------------------------------------------------ what is learned


def learning(results: Results) -> str:
    """Whether modes and adapters change what is learned; nothing where that was not measured."""
    measured = {name: result for name, result in results.items() if result.get("benchmark") == "learning"}
    every = [(name, row) for name, result in measured.items() for row in rows_of(result)]
    found = [(name, row) for name, row in every if again(results, name, row) is None]
    adapters = [(name, row) for name, row in found if row["part"] == "adapters"]
    modes = [cells for name, row in found if row["part"] == "modes" for cells in _mode_rows(name, row)]
    curves = [cells for name, row in adapters for cells in _curve_rows(name, row)]
    verdicts = [cells for name, row in adapters for cells in _verdict_rows(name, row)]
    lines = ["## What is learned\n"] if found else []
    if modes:
        head = [
            "file",
            "model",
            "dtype",
            "steps",
            "arm",
            "loss, largest",
            "mean",
            "first gradient",
            "allowed",
            "within",
        ]
        lines += [f"{MODES_WORDS}\n", markdown_table(head, modes)]
    if curves:
        head = ["file", "model", "dtype", "steps", "arm", "before", "on the way", "after"]
        lines += [f"{ADAPTERS_WORDS}\n", markdown_table(head, curves)]
    if verdicts:
        head = ["file", "arm", "against", "difference after", "relative", "allowed", "within"]
        lines.append(markdown_table(head, verdicts))
    return "\n".join(lines)


MODES_WORDS = (
    "Differences from eager steps of losses (nats a token, over all steps) and of the first gradient (relative). Arms "
    "named eager round the same arithmetic in other ways; a mode may deviate by as much as the largest of them, or by "
    "twice eager's own rounding error, which is its difference from float32."
)
ADAPTERS_WORDS = (
    "Held-out loss, nats a token. The difference between Slipstream and plain peft may be that of two seeds of plain "
    "peft, the one from adapters computed in float32 0.5%."
)


def _learned(name: str, row: Mapping[str, Any]) -> list[str]:
    return [name, row["model"], row["dtype"], str(row["steps"])]


def _mode_rows(name: str, row: Mapping[str, Any]) -> Iterable[list[str]]:
    for one in row["comparisons"]:
        measures = ("largest", "mean", "gradient")
        told = [f"{one[measure]:.2g}" for measure in measures]
        allowed = ", ".join(f"{one[f'allowed_{measure}']:.2g}" for measure in measures) if "within" in one else "–"
        yield [*_learned(name, row), one["arm"], *told, allowed, scalar("within", one.get("within"))]
    for arm, result in row["arms"].items():
        if "refused" in result:
            yield [*_learned(name, row), arm, "–", "–", "–", "–", f"left out: {result['refused']}"]


def _curve_rows(name: str, row: Mapping[str, Any]) -> Iterable[list[str]]:
    for arm, result in row["arms"].items():
        told = [f"{loss:.4f}" for loss in result.get("held_out", {}).values()]
        before, *way, after = told or ["–", f"left out: {result['refused']}", "–"]
        yield [*_learned(name, row), arm, before, ", ".join(way) or "–", after]


def _verdict_rows(name: str, row: Mapping[str, Any]) -> Iterable[list[str]]:
    for one in row["comparisons"]:
        allowed = f"{one['allowed']:.2g}" if "allowed" in one else "–"
        told = [f"{one['difference']:+.2g}", percent(one["relative"], 3), allowed]
        yield [name, one["arm"], one["against"], *told, scalar("within", one.get("within"))]


# ------------------------------------------------------------------------------------------------ any result


def section(name: str, results: Results, *, legend: bool = True) -> str:
    """One result: where it comes from, and everything it holds that fits a table; what columns mean with ``legend``."""
    result, benchmark = results[name], benchmark_of(name, results)
    commands = str(result.get("command", "command not recorded")).split("; ")
    lines = [f"## {benchmark.replace('_', ' ')}: `{name}`\n", f"{origin(result)}\n"]
    lines.append("\n".join(f"    {command}" for command in commands) + "\n")
    lines += [f"{text}\n" for text in (legend and LEGENDS.get(benchmark), rounds_told(result)) if text]
    lines += [f"**{result['note']}**\n"] if "note" in result else []
    for key in ("summary", "cases", "arms"):
        if isinstance(result.get(key), dict):
            lines += named(result[key]) if benchmark != "scaling" else processes(result)
    lines += [f"Its figures stand above, under *{ABOVE[benchmark]}*.\n"] if benchmark in ABOVE else []
    lines += newest_tables(name, results)
    gone = missing(result)
    for reason in dict.fromkeys(why for _, why in gone):
        names = "; ".join(what for what, why in gone if why == reason)
        lines.append(f"Not there, though asked for ({reason}): {names}.\n")
    return "\n".join(lines)


def benchmark_of(name: str, results: Results) -> str:
    """What was measured, by its file or else by the file's name."""
    return str(results[name].get("benchmark") or results[name].get("bench") or name)


def newest_tables(name: str, results: Results) -> Iterator[str]:
    """Tables of the cases that no later file has measured again, and a word about those that one has."""
    rows = rows_of(results[name])
    later = [again(results, name, row) for row in rows]
    if results[name].get("benchmark") not in ABOVE:
        yield from tables([row for row, file in zip(rows, later, strict=True) if file is None])
    for file in dict.fromkeys(file for file in later if file):
        count = later.count(file)
        which = "All of it was" if count == len(rows) else f"{count} of its {len(rows)} cases were"
        yield f"{which} measured again later, and shown there instead: `{file}`. This file keeps the older figures.\n"
    for arm, file in arms_again(results, name).items() if results[name].get("benchmark") == "train_step" else ():
        yield f"{arm} was measured again later: `{file}`.\n"


def rounds_told(result: Mapping[str, Any]) -> str:
    """How many rounds there were, where rows don't say it; and where they were fewer than asked for, why."""
    asked = int(option(str(result.get("command", "")), "--rounds", "0"))
    done = {row["rounds"] for row in rows_of(result) if "rounds" in row}
    if result.get("benchmark") == "experts" and done and max(done) < asked:
        return (
            f"{asked} rounds were asked for, and {max(done)} made: at this commit steps took a quarter of them, and "
            "transformers-eager two of its own, beside other rounds of grouped."
        )
    in_rounds = any("comparisons" in row for row in rows_of(result))
    return f"Rounds: {result['rounds']}." if "rounds" in result and in_rounds else ""


def origin(result: Mapping[str, Any]) -> str:
    """Device, versions, commit and date in a sentence."""
    versions = result.get("versions") or next(
        (run["versions"] for run in result.get("runs", ()) if "versions" in run), {}
    )
    names = ("torch", "transformers", "trl", "liger-kernel", "unsloth", "numpy", "python")
    told = [f"{name} {versions[name]}" for name in names if versions.get(name)]
    when = result.get("date") or result.get("when")
    date = str(when)[:10] if when else "date not recorded"
    commit = str(result.get("commit", "unknown"))[:12]
    device = result.get("device") or result.get("summary", {}).get("device", "device not recorded")
    return "; ".join([device, *([", ".join(told)] if told else []), f"commit {commit}", f"{date}."])


if __name__ == "__main__":
    sys.exit(main())
