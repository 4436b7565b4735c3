"""``docs/benchmarks.md`` from ``benchmarks/results/*.json``: every number there comes from a file here.

    python benchmarks/page.py            writes the page
    python benchmarks/page.py --check    fails where writing would change it

Nothing is known about single benchmarks but their words: a result's rows become tables of whatever scalars they hold,
comparisons tables of their own, and a key's ending gives its unit. New files therefore appear by themselves. Only the
published figures, and which of our rows stand beside them, are written down (``PUBLISHED``).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
INTRODUCTION = """# Benchmarks

Generated from `benchmarks/results/*.json` by `python benchmarks/page.py`; every file says on which device, with which
versions, at which commit and by which command it was made. Arms take turns in one process; intervals are 95% bootstrap
intervals of the median of differences within a round. A prediction *holds* where it lies in the interval, or within
20% of its middle.
"""
SOURCE = "an engineering post of May 2026 by Unsloth with NVIDIA"
LONGEST_TABLE = 40
"""Rows of a table; a result with more is summed up in its file."""

Rows = list[list[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or compare it; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not up to date")
    text = page(read_results(RESULTS))
    if not parser.parse_args(arguments).check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not what benchmarks/page.py writes; run it", file=sys.stderr)
    return 1


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Every result document by its file's name without the ending."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page."""
    parts = [INTRODUCTION, published(results), plans(results), learning(results)]
    parts += [section(name, result) for name, result in results.items()]
    return "\n".join(part.rstrip() + "\n" for part in parts if part)


# ------------------------------------------------------------------------------------------------ published beside ours


def published(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The published tables, ours beside them where a result has the same measurement."""
    return "\n".join(
        [
            f"## Published, and ours\n\nPublished figures: {SOURCE}. Other devices give other milliseconds; formulas "
            "and ratios are what must come out. A dash: not measured yet.\n",
            "### Boundaries of packed batches, built once\n",
            table(
                [
                    "model",
                    "layers",
                    "published: predicted",
                    "saved",
                    "of the step",
                    "ours: predicted",
                    "saved",
                    "ratio",
                ],
                list(_packing_rows(results)),
            ),
            "Published for Qwen3-14B QLoRA: forward +43.3%, backward +5.8%, whole batch +14.3%.\n",
            "### Reloads of offloaded activations, two buffers against one\n",
            table(
                ["model", "published: steps/s", "gain", "extra memory", "saved a step", "ours: gain", "extra", "saved"],
                list(_offload_rows(results)),
            ),
            "### Experts by one sort, against a loop\n",
            table(["what", "published", "ours"], list(_experts_rows(results))),
        ]
    )


PACKING = (
    ("Llama-3.2-1B", "llama-3.2-1b", 16, 0.206, 0.199, 0.115),
    ("Qwen3-0.6B", "qwen3-0.6b", 28, 0.370, 0.319, 0.148),
)
OFFLOAD = (
    ("8B dense", "qwen3-8b", "0.3739 → 0.4053", 0.0840, 0.37e9, 0.207),
    ("14B dense", "qwen3-14b", "0.2245 → 0.2395", 0.0670, 0.47e9, 0.279),
    ("32B dense", "qwen3-32b", "0.1979 → 0.2070", 0.0461, 0.23e9, 0.222),
)
EXPERTS = (
    ("routing and experts, forward", "layer", "forward", "+23%"),
    ("routing and experts, backward", "layer", "backward", "+13%"),
    ("whole step of gpt-oss", "step", "whole", "+10% to +15%"),
)


def _packing_rows(results: Mapping[str, Mapping[str, Any]]) -> Iterable[list[str]]:
    for model, shape, layers, predicted, saved, share in PACKING:
        ours = _comparison(results, "packing", {"shape": shape}, {"part": "whole", "against": "wasteful-loop"})
        ours = ours or _comparison(
            results, "packing", {"shape": shape}, {"part": "forward", "against": "wasteful-loop"}
        )
        mine = [scalar(key, ours.get(key)) for key in ("predicted_seconds", "saved_seconds", "ratio")]
        told = [scalar("seconds", predicted), scalar("seconds", saved), f"{share:.1%}"]
        yield [model, str(layers), *told, *mine]


def _offload_rows(results: Mapping[str, Mapping[str, Any]]) -> Iterable[list[str]]:
    for model, shape, speed, gain, extra, saved in OFFLOAD:
        asked = {"arm": "offload-2", "against": "offload-1", "part": "whole"}
        ours = _comparison(results, "offload", {"shape": shape}, asked)
        peaks = _peaks(results, shape)
        mine = [
            "–" if not ours else f"{1 / ours['ratio'] - 1:+.2%}",
            peaks,
            scalar("seconds", ours.get("saved_seconds")),
        ]
        yield [model, speed, f"{gain:+.2%}", scalar("bytes", extra), scalar("seconds", saved), *mine]


def _peaks(results: Mapping[str, Mapping[str, Any]], shape: str) -> str:
    """What the second buffer takes more at the peak."""
    for row in _rows(results, "offload"):
        arms = row.get("arms", {})
        if row.get("shape") == shape and {"offload-1", "offload-2"} <= set(arms):
            one, two = (arms[name].get("peak_bytes") for name in ("offload-1", "offload-2"))
            return "–" if one is None or two is None else scalar("bytes", two - one)
    return "–"


def _experts_rows(results: Mapping[str, Mapping[str, Any]]) -> Iterable[list[str]]:
    for words, part, of, told in EXPERTS:
        row = {"part": part, "shape": "gpt-oss-20b"}
        ours = _comparison(results, "experts", row, {"ours": "sorted-loop", "against": "where-loop", "part": of})
        gain = ours.get("gain", ours["ratio"] - 1 if "ratio" in ours else None)
        yield [words, told, "–" if gain is None else f"{gain:+.0%}"]


def _rows(results: Mapping[str, Mapping[str, Any]], benchmark: str) -> list[Mapping[str, Any]]:
    found = [result for result in results.values() if result.get("benchmark") == benchmark]
    return [row for result in found for row in result.get("rows", []) if isinstance(row, dict)]


def _comparison(
    results: Mapping[str, Mapping[str, Any]], benchmark: str, row: Mapping[str, Any], asked: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The first comparison like ``asked`` in a row like ``row``; empty where there is none."""
    for candidate in _rows(results, benchmark):
        if all(candidate.get(key) == value for key, value in row.items()):
            for comparison in candidate.get("comparisons", []):
                if all(comparison.get(key) == value for key, value in asked.items()):
                    return dict(comparison)
    return {}


# ------------------------------------------------------------------------------------------------ plan against run


def plans(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Predictions of ``slipstream plan`` beside runs, with their errors; bars: memory 10%, a captured step 20%."""
    rows = [
        [name, row["shape"], f"{row['layers']}", f"{row['tokens']:,}", row["choices"], *_errors(row)]
        for name, result in results.items()
        if result.get("benchmark") == "plan"
        for row in result["rows"]
    ]
    if not rows:
        return ""
    head = ["file", "model", "layers", "tokens", "choices", "memory", "measured", "error", "step", "measured", "error"]
    words = (
        "Predictions of the commit measured; `tests/cost/test_plan_against_run.py` makes today's for the same jobs.\n"
    )
    return "\n".join(["## Plan against run\n", words, table(head, rows)])


def _errors(row: Mapping[str, Any]) -> list[str]:
    cells = []
    for key in ("bytes", "seconds"):
        predicted, measured = row[f"predicted_{key}"], row[f"measured_{key}"]
        error = "–" if not measured else f"{predicted / measured - 1:+.0%}"
        cells += [scalar(key, predicted), scalar(key, measured), error]
    return cells


# ------------------------------------------------------------------------------------------------ what is learned


def learning(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Whether modes and adapters change what is learned; nothing where that was not measured."""
    found = [(name, row) for name, result in results.items() for row in _rows({name: result}, "learning")]
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
        lines += [f"{MODES_WORDS}\n", table(head, modes)]
    if curves:
        head = ["file", "model", "dtype", "steps", "arm", "before", "on the way", "after"]
        lines += [f"{ADAPTERS_WORDS}\n", table(head, curves)]
    if verdicts:
        lines.append(table(["file", "arm", "against", "difference after", "relative", "allowed", "within"], verdicts))
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
        told = [f"{one['difference']:+.2g}", f"{one['relative']:+.3%}", allowed]
        yield [name, one["arm"], one["against"], *told, scalar("within", one.get("within"))]


# ------------------------------------------------------------------------------------------------ any result


PARTS = ("arms", "modes", "comparisons")
"""What a row of a result may hold that takes a table of its own."""


def section(name: str, result: Mapping[str, Any]) -> str:
    """One result: where it comes from, and everything it holds that fits a table."""
    title = str(result.get("benchmark") or result.get("bench") or name).replace("_", " ")
    lines = [f"## {title}: `{name}`\n", f"{origin(result)}\n", f"    {result.get('command', 'command not recorded')}\n"]
    for key in ("summary", "cases", "arms"):
        if isinstance(result.get(key), dict):
            lines += _named(result[key])
    rows = [row for row in result.get("rows", []) if isinstance(row, dict)]
    if result.get("benchmark") not in ("plan", "learning"):  # which stand above with their errors and verdicts
        lines += _row_tables(rows)
    return "\n".join(lines)


def origin(result: Mapping[str, Any]) -> str:
    """Device, versions, commit and date in a sentence."""
    versions = result.get("versions", {})
    names = ("torch", "transformers", "trl", "liger-kernel", "unsloth", "numpy", "python")
    told = [f"{name} {versions[name]}" for name in names if versions.get(name)]
    date = str(result.get("date") or result.get("when") or "date not recorded")[:10]
    commit = str(result.get("commit", "unknown"))[:12]
    return f"{result.get('device', 'device not recorded')}; {', '.join(told)}; commit {commit}; {date}."


def _named(values: Mapping[str, Any]) -> list[str]:
    """A table of named mappings, and its lone numbers in a line."""
    mappings = {name: _flat(value) for name, value in values.items() if isinstance(value, dict)}
    lone = {name: value for name, value in values.items() if _is_scalar(value)}
    lines = [_table_of([{"": name, **value} for name, value in mappings.items()])] if mappings else []
    if lone:
        lines.append(", ".join(f"{words(name)}: {scalar(name, value)}" for name, value in lone.items()) + ".\n")
    return lines


def _row_tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows with arms, modes or comparisons each with tables of their own, the others together."""
    lines: list[str] = []
    for row in (row for row in rows if any(key in row for key in PARTS)):
        facts = [
            f"{words(key)} {scalar(key, value)}" for key, value in row.items() if _is_scalar(value) and key != "dtype"
        ]
        lines.append(f"{', '.join(facts)}.\n")
        for key in ("arms", "modes"):
            if isinstance(row.get(key), dict):
                lines.append(_table_of([{"": name, **_arm(arm)} for name, arm in row[key].items()]))
        if row.get("comparisons"):
            lines.append(_table_of([_flat(comparison) for comparison in row["comparisons"]]))
    plain = [row for row in rows if not any(key in row for key in PARTS)]
    if plain:
        lines.append(_table_of([_flat(row) for row in plain]))
    return lines


def _arm(arm: Any) -> dict[str, Any]:
    """An arm's scalars, with the median of every series of seconds."""
    if not isinstance(arm, dict):
        return {"": arm}
    seconds = arm.get("seconds")
    series = seconds if isinstance(seconds, dict) else {"": seconds}
    medians = {f"{part}_seconds".lstrip("_"): _median(values) for part, values in series.items()}
    return {**{key: value for key, value in _flat(arm).items() if key != "seconds"}, **medians}


def _median(values: Any) -> float | None:
    numbers = values if isinstance(values, list) else [values]
    return statistics.median(numbers) if numbers and all(isinstance(n, int | float) for n in numbers) else None


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of a mapping; those of mappings inside it are left to its file."""
    return {key: value for key, value in values.items() if _is_scalar(value)}


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key, value in row.items() if value is not None))
    if not keys:
        return ""
    shown = rows[:LONGEST_TABLE]
    more = f"\n{len(rows) - len(shown):,} more rows are in the file.\n" if len(rows) > len(shown) else ""
    return table([words(key) for key in keys], [[scalar(key, row.get(key)) for key in keys] for row in shown]) + more


def table(head: Sequence[str], rows: Rows) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def words(key: str) -> str:
    """A key as a heading, without the ending that tells its unit."""
    for ending in ("_seconds", "_bytes", "_ms", "_gb"):
        key = key.removesuffix(ending)
    return key.replace("_", " ")


def scalar(key: str, value: Any) -> str:
    """A value with the unit that its key tells."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if key.endswith("seconds") or (key.startswith("saved_") and abs(value) < 60):
        return _milliseconds(value * 1e3)
    if key.endswith("_ms"):
        return _milliseconds(value)
    if key.endswith("bytes"):
        return f"{value / 1e9:.2f} GB"
    if key.endswith("_gb"):
        return f"{value:.2f} GB"
    if "gain" in key.split("_"):
        return f"{value:+.1%}"
    if key in ("share", "fill", "share_of_floor"):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _milliseconds(value: float) -> str:
    if abs(value) >= 9_999.5:
        return f"{value / 1e3:.1f} s"
    return f"{value:.0f} ms" if abs(value) >= 99.95 else f"{value:.1f} ms" if abs(value) >= 9.995 else f"{value:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())
