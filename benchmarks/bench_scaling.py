"""Tokens a second on each GPU, as more of them train one model: scaling, exposed communication, memory.

    python benchmarks/bench_scaling.py --model qwen3-8b --processes 1,2                      # LoRA, DDP
    python benchmarks/bench_scaling.py --model qwen3-32b --train full --sharding fsdp2 --processes 2,4,8
    torchrun --nproc-per-node 2 benchmarks/bench_scaling.py --model qwen3-8b                 # one count; many nodes

Each count of processes is a run of its own, started with torchrun; every process gets the same number of full rows, so
scaling is weak: tokens/s a GPU against those of the smallest count. Weights are random, documents of realistic lengths.
Without a card the tiny model runs on processes of the CPU: that proves the script and says nothing about speed.

Exposed communication is the step's time less that of the same step whose ranks exchange no gradients (DDP, where the
step isn't captured); on a card also the time in which NCCL's kernels ran and no other kernel did, from a profile of
three steps (DDP and FSDP2). Every run asserts that all ranks took the same steps and that all documents' tokens were
learned from, once.

Prints a table and writes JSON (``--out``); the last line is the summary in JSON.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from slipstream.bench.shapes import SHAPES

BARS = {"lora": 0.95, "full": 0.85}
"""The least tokens/s a GPU against the smallest count."""
WARM_UP, PROFILED = 3, 3
ROOT = Path(__file__).parents[1]


def main() -> None:
    options = arguments()
    if "WORLD_SIZE" in os.environ:
        measure(options)
        return
    runs = [run_count(options, count) for count in options.processes]
    document = {
        "benchmark": "scaling",
        "command": command_line(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "summary": summary(options, runs),
        "runs": runs,
    }
    if options.out:
        Path(options.out).write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["summary"]))
    if any("error" in run for run in runs):
        sys.exit(1)


def arguments() -> argparse.Namespace:
    import torch

    cards = torch.cuda.device_count()
    counts = [count for count in (1, 2, 4, 8) if count <= max(cards, 2)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b" if cards else "tiny", choices=SHAPES)
    parser.add_argument("--train", default="lora", choices=["lora", "full"])
    parser.add_argument("--sharding", default="none", choices=["none", "fsdp2"])
    parser.add_argument("--processes", type=numbers, default=counts, help="counts, separated by commas")
    parser.add_argument("--tokens", type=int, default=8192 if cards else 256, help="tokens of a packed row")
    parser.add_argument("--steps", type=int, default=20 if cards else 6, help="timed steps, after a few to warm up")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--activations", default="recompute", choices=["keep", "recompute", "offload"])
    parser.add_argument("--mode", default="auto", choices=["auto", "eager", "compiled", "captured"])
    parser.add_argument("--out")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


# ------------------------------------------------------------------------------------------------- one count, launched


def run_count(options: argparse.Namespace, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}  # torchrun's own default, without its notice
        done = subprocess.run(
            [*launcher, __file__, *sys.argv[1:], "--result", str(result)],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        if not result.exists():
            run = {"processes": count, "error": (done.stderr or done.stdout)[-3000:]}
        else:
            run = json.loads(result.read_text())
    print_row(run)
    return run


def print_row(run: dict[str, Any]) -> None:
    if "error" in run:
        print(f"{run['processes']:3} processes failed:\n{run['error']}", flush=True)
        return
    exposed = run["exposed_communication_ms"]
    shown = ", ".join(f"{value:.1f} ms {how}" for how, value in exposed.items() if value is not None) or "not measured"
    each = f"{run['tokens_per_second_each']:,.0f} tokens/s each"
    print(
        f"{run['processes']:3} processes  step {run['step_ms']:8.1f} ms  {each}  "
        f"exposed: {shown}  device {max(run['device_peak_gb']):.1f} GB  host {max(run['host_peak_gb']):.1f} GB",
        flush=True,
    )


def summary(options: argparse.Namespace, runs: list[dict[str, Any]]) -> dict[str, Any]:
    done = [run for run in runs if "error" not in run]
    shown: dict[str, Any] = {"model": options.model, "train": options.train, "sharding": options.sharding}
    if not done:
        return {**shown, "failed": [run["processes"] for run in runs]}
    least = min(done, key=lambda run: run["processes"])
    for run in done:
        run["scaling"] = round(run["tokens_per_second_each"] / least["tokens_per_second_each"], 3)
    most = max(done, key=lambda run: run["processes"])
    return {
        **shown,
        "device": most["device"],
        "tokens_per_second_each": {run["processes"]: run["tokens_per_second_each"] for run in done},
        "scaling": {run["processes"]: run["scaling"] for run in done},
        "bar": BARS[options.train],
        "at_or_above_bar": most["scaling"] >= BARS[options.train] if len(done) > 1 else None,
        "failed": [run["processes"] for run in runs if "error" in run],
    }


# ------------------------------------------------------------------------------------------------- one rank


def measure(options: argparse.Namespace) -> None:
    import torch

    from slipstream.train.ranks import Ranks

    with Ranks.joined() as ranks, tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        model = model_of(options)
        end = WARM_UP + options.steps
        profile = Profile(end, scratch) if torch.cuda.is_available() and ranks.count > 1 else None
        steps = end + (PROFILED if profile else 0) + 1
        rows = rows_of(options, ranks.count, steps)
        trained = train(options, model, rows, scratch, ranks, steps, profile=profile)
        checked(trained, rows, ranks, steps)
        silent = None
        # A second training in this process records its step anew, which takes longer than what is to be measured.
        recorded = any(told.startswith("step: on (captured") for told in trained["decisions"])
        if options.sharding == "none" and ranks.count > 1 and not recorded:
            silent = train(options, model, rows, scratch, ranks, end + 1, silent=True)["step_ms"]
        peaks = ranks.gathered((torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0, host_peak()))
        result = {
            "processes": ranks.count,
            "step_ms": trained["step_ms"],
            "step_ms_each_step": trained["each_ms"],
            "tokens_a_row": options.tokens,
            "tokens_per_second_each": round(options.tokens / trained["step_ms"] * 1e3, 1),
            "exposed_communication_ms": {
                "against silent ranks": None if silent is None else round(trained["step_ms"] - silent, 3),
                "in a profile": None if profile is None else profile.exposed_ms(),
            },
            "device_peak_gb": [round(device / 1e9, 3) for device, _ in peaks],
            "host_peak_gb": [round(host / 1e9, 3) for _, host in peaks],
            "decisions": trained["decisions"],
            "documents": trained["documents"],
            "learned_tokens": trained["learned"],
            **environment(),
        }
        if ranks.first and options.result:
            Path(options.result).write_text(json.dumps(result))
        elif ranks.first:
            print_row(result)
            print(json.dumps(result))


def model_of(options: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import slipstream
    from slipstream.model.lora import AdapterOptions, add_adapter

    card = torch.cuda.is_available()
    shape = dict(SHAPES[options.model])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    config.num_hidden_layers = options.layers or config.num_hidden_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    with torch.device("cuda" if card else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if card else torch.float32)
    if options.train == "lora":
        model = add_adapter(model, AdapterOptions(rank=16, alpha=16), seed=0)
    dtype = torch.bfloat16 if card else torch.float32
    how = slipstream.Options(activations=options.activations, tokens=options.tokens, compute_dtype=dtype)
    return slipstream.apply(model, how)


def rows_of(options: argparse.Namespace, ranks: int, steps: int) -> list[dict[str, Any]]:
    """Full rows for ``steps`` steps of all ranks, but for the last step, in which only the first rank has one."""
    from slipstream.bench.shapes import random_documents

    rows = []
    for seed in range((steps - 1) * ranks + 1):
        documents = random_documents(options.tokens, SHAPES[options.model]["vocab_size"], seed)
        ids = [token for document in documents for token in document["input_ids"]]
        lengths = [len(document["input_ids"]) for document in documents]
        rows.append({"input_ids": ids, "labels": ids, "seq_lengths": lengths})
    return rows


class Profile:
    """Three steps' kernels on this rank's device."""

    def __init__(self, begin: int, scratch: str) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.begin, self.trace = begin, Path(scratch) / "trace.json"
        self.recorder = profile(activities=[ProfilerActivity.CUDA])

    def step_ended(self, step: int) -> None:
        if step in (self.begin, self.begin + PROFILED):
            synchronize()
            (self.recorder.start if step == self.begin else self.recorder.stop)()

    def exposed_ms(self) -> float:
        """Milliseconds a step in which NCCL's kernels ran and no other kernel did."""
        self.recorder.export_chrome_trace(str(self.trace))
        events = json.loads(self.trace.read_text())["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        spans = [(event["ts"], event["ts"] + event["dur"], "nccl" in event["name"].lower()) for event in kernels]
        return round(uncovered(spans) / PROFILED / 1e3, 3)


def train(
    options: argparse.Namespace,
    model: Any,
    rows: list[dict[str, Any]],
    scratch: str,
    ranks: Any,
    steps: int,
    *,
    silent: bool = False,
    profile: Profile | None = None,
) -> dict[str, Any]:
    """Train ``steps`` steps; the time of a step is that of all timed ones over their number, or where one of them
    recorded a graph, which takes seconds, their median.
    """
    import torch
    from transformers import TrainerCallback, TrainingArguments

    import slipstream
    from slipstream.train.records import StepLog, StepRecord

    records: list[StepRecord] = []
    decided: list[Any] = []
    at: dict[int, float] = {}
    recordings: dict[int, int] = {}
    end = WARM_UP + options.steps

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (WARM_UP, end):
                synchronize()
            at[state.global_step] = time.perf_counter()
            recordings[state.global_step] = trainer.step.recordings if trainer.step else 0
            if profile is not None:
                profile.step_ended(state.global_step)

    class Silent(slipstream.Trainer):
        """Ranks that exchange no gradients, where ``silent``."""

        def exchange(self) -> None:
            if not silent:
                super().exchange()

        def training_step(self, model: Any, *arguments: Any, **named: Any) -> Any:
            # Behind a recording the trainer exchanges gradients itself; else the wrapper around the model does.
            with model.no_sync() if silent and not self.exchanges else nullcontext():
                return super().training_step(model, *arguments, **named)

    card = torch.cuda.is_available()
    log = StepLog(None)
    trainer = Silent(
        model,
        TrainingArguments(
            scratch,
            max_steps=steps,
            per_device_train_batch_size=1,
            learning_rate=1e-5,
            report_to="none",
            save_strategy="no",
            optim="adamw_torch_fused",
            disable_tqdm=True,
            log_level="error",
            log_level_replica="error",
            use_cpu=not card,
            dataloader_num_workers=2 if card else 0,
            dataloader_pin_memory=card,
        ),
        train_dataset=rows,
        data_collator=slipstream.PackedCollator(tokens=options.tokens),
        compute_dtype=torch.bfloat16 if card else None,
        step_log=log,
        mode=options.mode,
        sharding=options.sharding,
        on_decision=decided.append,
        callbacks=[Clock()],
        **optimizer_of(options, model),
    )
    note = trainer._log_record
    log.on_record = lambda record: (records.append(record), note(record))
    ranks.any(False)  # all begin together
    trainer.train()
    each = [(at[step] - at[step - 1]) * 1e3 for step in range(WARM_UP + 1, end + 1)]
    recorded = recordings[end] - recordings[WARM_UP]
    seconds = statistics.median(each) / 1e3 if recorded else (at[end] - at[WARM_UP]) / options.steps
    told = [trainer.ranks_decision(), trainer.sharding_decision, *slipstream.decisions(model), *decided]
    return {
        "step_ms": round(max(ranks.gathered(seconds)) * 1e3, 3),
        "each_ms": [round(value, 2) for value in each],
        "median_ms": round(statistics.median(each), 3),
        "steps": [record.step for record in records],
        "documents": sum(record.documents for record in records),
        "learned": sum(record.learned_tokens for record in records),
        "decisions": [str(decision) for decision in told if decision is not None],
    }


def optimizer_of(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """float32 masters in the optimizer, where bf16 weights are trained."""
    import torch

    if options.train == "lora" or next(model.parameters()).dtype == torch.float32:
        return {}
    from slipstream.train.optimizers import MasterAdamW

    return {"optimizer_cls_and_kwargs": (MasterAdamW, {"lr": 1e-5})}


def checked(trained: dict[str, Any], rows: list[dict[str, Any]], ranks: Any, steps: int) -> None:
    """Every rank took the same steps, and all documents were learned from, once."""
    assert ranks.gathered(trained["steps"]) == [list(range(1, steps + 1))] * ranks.count
    documents = sum(len(row["seq_lengths"]) for row in rows)
    learned = sum(len(row["input_ids"]) for row in rows) - documents  # none learns its first token
    assert (trained["documents"], trained["learned"]) == (documents, learned), (trained, documents, learned)


def uncovered(spans: list[tuple[float, float, bool]]) -> float:
    """The time covered by spans that are marked and by none that is not."""
    both, others = length([(a, b) for a, b, _ in spans]), length([(a, b) for a, b, marked in spans if not marked])
    return both - others


def length(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_peak() -> int:
    """The most memory this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def environment() -> dict[str, Any]:
    import torch

    from slipstream.versions import library_versions

    card = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if card else f"CPU ({platform.machine()})",
        "versions": {"python": platform.python_version(), **library_versions()},
        "cuda": torch.version.cuda,
    }


def command_line() -> str:
    """The command without where its output went."""
    words = sys.argv[1:]
    if "--out" in words:
        at = words.index("--out")
        words = words[:at] + words[at + 2 :]
    return " ".join(["python benchmarks/bench_scaling.py", *words])


def commit() -> str:
    """The commit measured; ``SLIPSTREAM_COMMIT`` names it where the tree has come without its history."""
    if told := os.environ.get("SLIPSTREAM_COMMIT"):
        return told
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
