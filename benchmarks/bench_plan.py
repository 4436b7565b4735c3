"""Plan against run: predicted peak memory and step time beside what a real training of the same job shows.

    python benchmarks/bench_plan.py --shape qwen3-0.6b --mode captured --out benchmarks/results/plan_h200.json
    python benchmarks/bench_plan.py --shape qwen3-8b --tokens 8192 --activations recompute
    python benchmarks/bench_plan.py --shape qwen3-14b --layers 20 --nf4 --activations recompute
    python benchmarks/bench_plan.py --shape gpt-oss-20b --layers 12 --activations recompute
    python benchmarks/bench_plan.py --run runs/demo --out benchmarks/results/plan_cpu.json

Random weights of a real shape, documents of lognormal lengths that fill every row, rank-16 adapters, Slipstream's own
trainer, timed by marks at the end of each step that nobody waits for; steps that recorded a graph are left out. The
prediction is made as ``slipstream plan`` makes it, from the configuration and lengths alone, for the mode and the split
of layers that training took. ``--out`` adds a row to a file that is there already, so that several calls make one
table. Without a card only ``--shape tiny`` is worth its time; ``--run`` takes prediction and measurement from the
records of a training that was made, on any device: the plan that it recorded before its first step, its median step.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

WARM_UP = 3
"""Steps after the first that are not counted."""
DEFAULTS = {"qwen3-0.6b": 4096, "llama-3.2-1b": 4096, "qwen3-8b": 8192, "tiny": 256}


def main() -> None:
    options = arguments()
    import torch

    from slipstream.bench.document import document
    from slipstream.plan.facts import this_machine

    if not torch.cuda.is_available() and options.shape != "tiny" and not options.run:
        print("no CUDA device: this benchmark compares a plan with a run on a card, and is left out here")
        return
    target = this_machine()
    row = recorded(Path(options.run)) if options.run else compared(options, target)
    print(json.dumps(row, indent=2))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = document("plan", device, [row], ceilings={**vars(target.rates)})
    row.update(commit=made["commit"], ceilings=made["ceilings"])  # a file may have rows of several calls
    made["command"] = " ".join(["python benchmarks/bench_plan.py", *without_paths(sys.argv[1:])])
    if options.out:
        path = Path(options.out)
        if path.exists():
            before = json.loads(path.read_text())
            made["rows"] = [*before["rows"], row]
            made["command"] = f"{before['command']}; {made['command']}"
        path.write_text(json.dumps(made, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--activations", default="auto", help="auto, keep, recompute or offload")
    parser.add_argument("--mode", default="auto", help="auto, eager, compiled or captured")
    parser.add_argument("--nf4", action="store_true", help="the decoder's linear layers in NF4 (bitsandbytes)")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--run", help="a run folder: no training, what its records hold")
    parser.add_argument("--out")
    options = parser.parse_args()
    options.tokens = options.tokens or DEFAULTS.get(options.shape, 4096)
    return options


def compared(options: argparse.Namespace, target: Any) -> dict[str, Any]:
    """Train, then predict the job that was trained, and put both side by side."""
    from slipstream.bench.shapes import random_documents, shape_config

    config = shape_config(options.shape, options.layers)
    rows = [random_documents(options.tokens, config.vocab_size, seed=i) for i in range(options.steps)]
    measured = trained(options, config, rows)
    lengths = [len(document["input_ids"]) for row in rows for document in row]
    prediction = predicted(options, config, lengths, measured, target)
    times, split = prediction.times, prediction.job.layers
    named = {"kept": split.kept, "recomputed": split.recomputed, "offloaded": split.offloaded}
    policy = ", ".join(f"{count} {name}" for name, count in named.items() if count)
    return {
        "shape": options.shape,
        "layers": config.num_hidden_layers,
        "tokens": options.tokens,
        "choices": f"{policy}; {measured['mode']}; {prediction.job.attention}{'; NF4' if options.nf4 else ''}",
        "predicted_bytes": round(prediction.memory.device_bytes),
        "measured_bytes": measured["peak_bytes"],
        "predicted_seconds": times.total,
        "measured_seconds": measured["seconds"],
        "fastest_seconds": measured["fastest"],
        "steps_timed": measured["timed"],
        "recordings": measured["recordings"],
        "floor_seconds": times.floor,
        "memory": {part.name: round(part.bytes) for part in prediction.memory.device},
        "times": {**vars(times)},
        "decisions": measured["decisions"],
        "steps": measured["all_seconds"],
    }


def recorded(folder: Path) -> dict[str, Any]:
    """What a run's own plan said, beside its median step and its peak."""
    from slipstream.report.against_plan import median_step
    from slipstream.train.records import read_records

    records = read_records(folder)
    plan, recipe = records.run["plan"], records.run["recipe"]
    if "missing" in plan:
        sys.exit(f"{folder} has no prediction: {plan['missing']}")
    steps = [step.seconds for step in records.steps]
    peaks = [step.memory_bytes for step in records.steps if step.memory_bytes]
    chosen = {decision["name"]: decision["reason"] for decision in records.run["decisions"]}
    return {
        "shape": f"{Path(recipe['model']).stem}, {Path(recipe['output']).name}",
        "layers": "all",
        "tokens": recipe["packing"]["tokens"],
        "choices": "; ".join(chosen[name].partition(":")[0] for name in ("step", "attention") if name in chosen),
        "predicted_bytes": plan["device_bytes"],
        "measured_bytes": max(peaks, default=None),
        "predicted_seconds": plan["step_seconds"],
        "measured_seconds": median_step(records),
        "steps_timed": len(steps) - 1,
        "floor_seconds": plan["floor_seconds"],
        "steps": [round(second, 5) for second in steps],
    }


def trained(options: argparse.Namespace, config: Any, rows: list[list[dict[str, list[int]]]]) -> dict[str, Any]:
    """A short training: its median step, recordings apart, its peak, and what it decided."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainingArguments

    import slipstream
    from slipstream.bench.shapes import bench_dtype, hold_in_four_bits
    from slipstream.bench.step_clock import StepClock
    from slipstream.model.lora import AdapterOptions, add_adapter
    from slipstream.transform import applied

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with device:
        base = AutoModelForCausalLM.from_config(config, dtype=bench_dtype(device))
    if options.nf4:
        hold_in_four_bits(base)
    model = add_adapter(base, AdapterOptions(rank=16, alpha=16), seed=0)
    compute = bench_dtype(device)
    asked = slipstream.Options(activations=options.activations, tokens=options.tokens, compute_dtype=compute)
    slipstream.apply(model, asked)
    hung, told, counts = applied(model), [], [0]

    def recordings() -> int:  # the trainer lets go of its step when it is done
        counts.append(trainer.step.recordings if trainer.step else counts[-1])
        return counts[-1]

    timer = StepClock(device, recordings)
    packed = slipstream.pack_dataset(Dataset.from_list([d for row in rows for d in row]), options.tokens)
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            output_dir=scratch,
            max_steps=options.steps,
            per_device_train_batch_size=1,
            learning_rate=1e-4,
            report_to="none",
            save_strategy="no",
            optim="adamw_torch_fused",
            dataloader_num_workers=0,
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
        )
        trainer = slipstream.Trainer(
            model,
            settings,
            train_dataset=packed,
            data_collator=slipstream.PackedCollator(tokens=options.tokens),
            compute_dtype=None if compute == torch.float32 else compute,
            mode=options.mode,
            on_decision=lambda decision: told.append(decision),
            callbacks=[timer],
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    seconds = timer.seconds()
    steps = list(zip(seconds, timer.recorded(), strict=True))
    steady = [second for second, recorded in steps[WARM_UP:] if not recorded] or seconds
    modes = [str(decision.reason).partition(":")[0].partition(",")[0] for decision in told if decision.name == "step"]
    return {
        "seconds": statistics.median(steady),
        "fastest": min(steady),
        "timed": len(steady),
        "recordings": counts[-1],
        "all_seconds": [round(second, 5) for second in seconds],
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "mode": modes[-1] if modes else "eager",
        "attention": hung.attention,
        "split": hung.split,
        "decisions": [str(decision) for decision in [*slipstream.decisions(model), *told]],
    }


def predicted(
    options: argparse.Namespace, config: Any, lengths: list[int], measured: dict[str, Any], target: Any
) -> Any:
    """What ``slipstream plan`` says of the same job, with the mode and the split that training took."""
    import numpy as np

    from slipstream.plan.facts import Facts, adapted_sizes, shape_of, skeleton
    from slipstream.plan.prediction import Taken, predict
    from slipstream.recipe import recipe_from_dict

    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tree = {
            "model": folder,
            "data": {"train": "random"},
            "packing": {"tokens": options.tokens},
            "train": {"mode": measured["mode"], "steps": options.steps},
            "output": "none",
        }
        recipe = recipe_from_dict(tree)
        model = skeleton(recipe)
    found = Facts(
        model=model,
        shape=shape_of(model),
        adapted=adapted_sizes(recipe.adapter, model),
        saved=0,
        lengths=np.array(lengths, dtype=np.int64),
        eval_lengths=None,
        account={},
    )
    prediction = predict(recipe, found, target, Taken(measured["attention"], measured["split"]))
    return in_four_bits(prediction, target) if options.nf4 else prediction


def in_four_bits(prediction: Any, target: Any) -> Any:
    """The prediction for NF4 weights, which the recipe of a random model can't ask for."""
    from slipstream.cost.memory import memory
    from slipstream.cost.step import step_times

    job = replace(prediction.job, nf4=True)
    return replace(prediction, job=job, memory=memory(job), times=step_times(job, target.rates))


def without_paths(words: list[str]) -> list[str]:
    at = words.index("--out") if "--out" in words else len(words)
    return words[:at] + words[at + 2 :]


if __name__ == "__main__":
    main()
