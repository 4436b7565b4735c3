"""Whether Slipstream's speed-ups change what is learned: its modes beside one another, its adapters beside peft's.

    python benchmarks/bench_learning.py --part modes --model SmolLM2.gguf --data alpaca.json --out modes.json
    python benchmarks/bench_learning.py --part modes --model tiny --data alpaca.json          # in float32
    python benchmarks/bench_learning.py --part adapters --model SmolLM2.gguf --data alpaca.json --arms peft --out b.json
    python benchmarks/bench_learning.py --merge a.json b.json c.json d.json --out benchmarks/results/learning.json

``modes``: 50 steps eager, compiled and captured through Slipstream's trainer as ``slipstream train`` runs it, with the
same seed and rows: losses of all steps and the first step's gradient (before clipping) against eager's. Beside them the
spread: other eager ways of the same arithmetic, which are as exact and round differently (``eager-again``,
``eager-recompute``, ``eager-masked``: attention by the masked product, ``eager-peft``: peft's own adapter forward). A
second eager run alone would be no measure, as eager steps may repeat bit for bit. ``eager-float32`` computes the same
weights in float32, which tells eager's own rounding error; how both are used is written in
``slipstream/bench/learning_verdicts.py``. ``eager`` is always run, since the others are compared with its gradient.

``adapters``: 300 steps and the held-out loss on the way: ``slipstream`` (the default: captured on a card, products in
half precision of float32 masters), ``peft`` and ``peft-seed-1`` (transformers' trainer and peft alone, bf16 autocast;
the second seed changes first weights and order), and ``float32`` (as ``peft``, adapters computed in float32). See
``slipstream/bench/learning_arms.py`` for what runs.

Arms of ``adapters`` may run as several processes on one card, each with ``--arms`` and ``--out``; ``--merge`` makes one
result of theirs. ``--out`` is written after each arm. The last line printed is the verdicts in JSON.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = {"modes": 50, "adapters": 300}
REFERENCES = ("eager", "eager-float32")
"""Arms whose gradients later ones are compared with."""
DTYPES = ("auto", "float32", "bfloat16")
NAMES_OF_FILES = ("--out", "--data", "--model", "--merge")


def main(words: Sequence[str] | None = None) -> int:
    """Measure or merge; gives the exit code: 2 for what can't be measured, with one message."""
    from slipstream.errors import InputError

    try:
        options = arguments(words)
        result = merge(options) if options.merge else measure(options, list(sys.argv[1:] if words is None else words))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    show(result)
    return 0


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="all", choices=[*STEPS, "all"])
    parser.add_argument("--model", default="tiny", help="a shape's name, a model folder or a GGUF file")
    parser.add_argument("--data", help="a JSON or JSONL file of rows")
    parser.add_argument("--fields", help="the data's names of fields, e.g. prompt=question,completion=answer")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a packed row")
    parser.add_argument("--steps", type=int, help="50 for modes, 300 for adapters")
    parser.add_argument("--every", type=int, default=50, help="steps between held-out losses")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="auto: float32 for tiny, else bf16 on a card")
    parser.add_argument("--arms", help="some of the part's arms, separated by commas")
    parser.add_argument("--merge", nargs="+", metavar="JSON", help="results to make one of, in place of measuring")
    parser.add_argument("--out")
    options = parser.parse_args(words)
    if options.out:
        from slipstream.bench.document import check_writable

        check_writable(Path(options.out))
    return options


# ------------------------------------------------------------------------------------------------ measuring


def measure(options: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Train the arms, part by part, and write the result after each."""
    import torch

    from bench_train_step import byte_tokenizer  # beside this script
    from slipstream.bench.document import document
    from slipstream.bench.learning import read
    from slipstream.places import keep_compiled_code
    from slipstream.prepare import quiet_libraries

    asked = arms_asked(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    benches = {part: bench_of(options, part, device) for part in asked}
    quiet_libraries()
    keep_compiled_code()
    material = read(next(iter(benches.values())), byte_tokenizer)
    rows: list[dict[str, Any]] = []
    result = document("learning", device, rows)
    result["command"] = command_line(words)
    for part, names in asked.items():
        rows.append({"part": part, **benches[part].facts(), **material.counts, "arms": {}, "comparisons": []})
        gradients: dict[str, Any] = {}
        for name in names:
            rows[-1]["arms"][name] = run_arm(part, name, benches[part], material, gradients)
            write(options, result)
    return result


def arms_asked(options: argparse.Namespace) -> dict[str, list[str]]:
    """Part → names of the arms to run. Raises ``InputError`` for one unknown."""
    from slipstream.bench.learning import PARTS
    from slipstream.errors import InputError

    parts = list(PARTS) if options.part == "all" else [options.part]
    known = [name for part in parts for name in PARTS[part]]
    wanted = known if options.arms is None else [name.strip() for name in options.arms.split(",") if name.strip()]
    for name in wanted or [options.arms]:
        if name not in known:
            raise InputError(f"--arms {name!r}: unknown for --part {options.part}; there are {', '.join(known)}")
    asked = {part: [name for name in PARTS[part] if name in wanted] for part in parts}
    if asked.get("modes") and "eager" not in asked["modes"]:
        asked["modes"].insert(0, "eager")
    return {part: names for part, names in asked.items() if names}


def bench_of(options: argparse.Namespace, part: str, device: Any) -> Any:
    import torch

    from slipstream.bench.learning import Learning
    from slipstream.bench.shapes import bench_dtype
    from slipstream.errors import InputError

    if options.data is None:
        raise InputError("--data is missing; give a JSON or JSONL file of rows")
    pairs = [pair.partition("=") for pair in (options.fields or "").split(",") if pair]
    auto = torch.float32 if options.model == "tiny" else bench_dtype(device)
    return Learning(
        model=gguf_in(options.model),
        data=options.data,
        device=device,
        dtype=auto if options.dtype == "auto" else getattr(torch, options.dtype),
        fields={name.strip(): there.strip() for name, _, there in pairs},
        tokens=options.tokens,
        steps=STEPS[part] if options.steps is None else options.steps,
        every=options.every,
    )


def gguf_in(model: str) -> str:
    """The model as given; for a folder with nothing but a GGUF file that could be loaded, the file."""
    folder = Path(model)
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() and not (folder / "config.json").exists() else []
    return str(files[0]) if len(files) == 1 else model


def run_arm(part: str, name: str, bench: Any, material: Any, gradients: dict[str, Any]) -> dict[str, Any]:
    """One arm's result, or why it can't be had here; ``gradients`` keeps eager's for the others."""
    from slipstream.bench.learning import PARTS, distance, trained
    from slipstream.errors import InputError

    try:
        found, gradient = trained(bench, material, PARTS[part][name], held_out=part == "adapters")
    except InputError as error:
        print(f"{part}: {name:16} left out: {error}", flush=True)
        return {"refused": str(error)}
    if part == "modes":
        if name in REFERENCES:
            gradients[name] = gradient
        found["gradient_distance"] = {other: distance(gradient, kept) for other, kept in gradients.items()}
    first, last = found["losses"][0], found["losses"][-1]
    print(
        f"{part}: {name:16} {found['ran']:9} {found['arm_seconds']:7.1f} s  loss {first:.4f} to {last:.4f}", flush=True
    )
    return found


# ------------------------------------------------------------------------------------------------ results


def merge(options: argparse.Namespace) -> dict[str, Any]:
    """One result of several processes'."""
    from slipstream.bench.learning_verdicts import merged
    from slipstream.errors import InputError

    for path in options.merge:
        if not Path(path).is_file():
            raise InputError(f"--merge {path}: no such file; give results that --out has written")
    result = merged([json.loads(Path(path).read_text(encoding="utf-8")) for path in options.merge])
    write(options, result)
    return result


def write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Compare what is there so far, and write it."""
    from slipstream.bench.learning_verdicts import compared

    result["rows"][:] = [compared(row) for row in result["rows"]]
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def show(result: dict[str, Any]) -> None:
    """Every comparison in a line, and the verdicts as the last one."""
    from slipstream.bench.learning_verdicts import verdicts

    for row in result["rows"]:
        for name, arm in row["arms"].items():
            if "held_out" in arm:
                told = ", ".join(f"{loss:.4f} after {step}" for step, loss in arm["held_out"].items())
                print(f"{row['part']}: {name} held out {told}")
        for one in row["comparisons"]:
            numbers = ", ".join(f"{key} {value:.3g}" for key, value in one.items() if isinstance(value, float))
            print(f"{row['part']}: {one['arm']} against {one['against']}: {numbers}, within: {one.get('within', '-')}")
    print(json.dumps({"benchmark": "learning", **{row["part"]: verdicts(row) for row in result["rows"]}}))


def command_line(words: Sequence[str]) -> str:
    """The command without where its output went, and with names for this machine's paths."""
    kept: list[str] = []
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        option = name if word.startswith("--") else option
        if option != "--out":
            path = value if equals and word.startswith("--") else word
            kept.append(
                word.removesuffix(path) + Path(path).name if option in NAMES_OF_FILES and path != option else word
            )
    return " ".join(["python benchmarks/bench_learning.py", *kept])


if __name__ == "__main__":
    sys.exit(main())
