"""How long `slipstream.pack` takes for a million documents, beside the bar of 2 seconds on one core.

    OMP_NUM_THREADS=1 python benchmarks/bench_packing_speed.py

Lengths are lognormal (as those of instruction sets are, roughly), clipped to the row. The last line is the JSON that is
also written to ``results/packing_speed.json``.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.data.packing import PackingReport, pack

BAR_SECONDS = 2.0
RESULTS = Path(__file__).parent / "results" / "packing_speed.json"
CASES = {"4096": (4096, 5.5), "32768": (32_768, 6.5)}
"""Tokens of a row, and the mean of the logarithm of lengths (its deviation is 1)."""


def measure(documents: int, capacity: int, mean: float, runs: int) -> dict[str, Any]:
    lengths = np.clip(np.random.default_rng(0).lognormal(mean, 1.0, documents).astype(np.int64), 1, capacity)
    clocks = [once(lengths, capacity) for _ in range(runs)]
    seconds = [wall for wall, _ in clocks]
    rows = pack(lengths, capacity)
    report = PackingReport.of(lengths, rows, capacity)
    return {
        "documents": documents,
        "tokens_per_row": capacity,
        "seconds_median": round(statistics.median(seconds), 4),
        "cpu_seconds_median": round(statistics.median(cpu for _, cpu in clocks), 4),
        "seconds": [round(value, 4) for value in seconds],
        "rows": report.rows,
        "rows_least_possible": -(-report.tokens // capacity),
        "fill": round(report.fill, 6),
        "padded_over_packed_tokens": round(report.padded_tokens / (report.rows * capacity), 3),
    }


def once(lengths: npt.NDArray[np.int64], capacity: int) -> tuple[float, float]:
    """Wall-clock and processor seconds; they differ where the machine is busy with other work."""
    wall, cpu = time.perf_counter(), time.process_time()
    pack(lengths, capacity)
    return time.perf_counter() - wall, time.process_time() - cpu


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    cases = {name: measure(chosen.documents, *case, chosen.runs) for name, case in CASES.items()}
    for case in cases.values():
        print(
            f"{case['documents']:,} documents into rows of {case['tokens_per_row']:,}: {case['seconds_median']:.2f} s "
            f"({case['cpu_seconds_median']:.2f} s of processor time, bar {BAR_SECONDS} s), {case['rows']:,} rows "
            f"(least possible {case['rows_least_possible']:,}), {case['fill']:.2%} full"
        )
    result = {
        "bench": "packing_speed",
        "device": "CPU, 1 thread",
        "bar_seconds": BAR_SECONDS,
        "within_bar": cases["4096"]["seconds_median"] < BAR_SECONDS,
        "cases": cases,
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "command": " ".join(["python", "benchmarks/bench_packing_speed.py", *sys.argv[1:]]),
        "commit": commit(),
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
