"""Whole training steps: Slipstream's trainer beside transformers + TRL + Liger and Unsloth, on the same documents.

    python benchmarks/bench_train_step.py --model qwen3-0.6b --tokens 4096 --rounds 3
    python benchmarks/bench_train_step.py --model qwen3-8b --tokens 8192 --checkpointing --arms slipstream,unsloth
    python benchmarks/bench_train_step.py --model gpt-oss-20b --checkpointing --arms slipstream,trl:grouped_mm,trl:eager
    python benchmarks/bench_train_step.py --model qwen3-14b --nf4 --checkpointing \\
        --arms slipstream:offload,unsloth:offload
    python benchmarks/bench_train_step.py --model path/to/model --data alpaca.json --tokens 4096

Each arm runs in a process of its own, since Liger and Unsloth replace functions for the whole process; the arms take
turns, ``--rounds`` times. All processes import what they need before the first turn, and then wait for theirs. All
trainers are timed by the same callback: an event on the device's stream at the end of each step, so that nobody is made
to wait; loader, clipping, optimizer and scheduler lie inside.
``slipstream:eager`` (or ``compiled``, ``captured``) names a mode; ``slipstream:offload`` and ``unsloth:offload`` keep
checkpoints on the host; ``trl:grouped_mm`` and ``trl:eager`` take transformers' experts, without Liger. Of mixtures
only attention has adapters.

Without ``--data`` the documents have random tokens and lognormal lengths (mean about 250) that fill every row exactly;
with it they are the tokenised rows of the file. Weights are random for a named shape; ``--nf4`` has all arms load them
in four bits, double quantisation, from one checkpoint in half precision. Writes JSON (``--out``) and
prints a table.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slipstream.bench.shapes import MIXTURES, shape_config
from slipstream.bench.shapes import SHAPES as DENSE

ARMS = {
    "slipstream": "auto",
    "slipstream:eager": "eager",
    "slipstream:compiled": "compiled",
    "slipstream:captured": "captured",
    "slipstream:offload": "auto",
    "trl+liger": "",
    "trl:grouped_mm": "",
    "trl:eager": "",
    "unsloth": "",
    "unsloth:offload": "",
}
WARM_UP = 6
SHAPES = {**DENSE, **MIXTURES}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def main() -> None:
    options = arguments()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: this benchmark compares training steps on a card, and is left out here")
        return
    if options.save:
        save_model(options)
        return
    if options.arm:
        print("RESULT " + json.dumps(run_arm(options)))
        return
    results = []
    if options.model in SHAPES and (options.nf4 or "unsloth" in options.arms):
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--save"], check=True)
    turns = [(turn, arm) for turn in range(options.rounds) for arm in options.arms.split(",")]
    waiting = [start_child(arm, number) for number, (_, arm) in enumerate(turns)]
    for (round_number, arm), child in zip(turns, waiting, strict=True):
        results.append({"round": round_number, **take_turn(arm, child)})
        print_row(results[-1])
        if options.out:  # after each run, so that one cut short has not measured for nothing
            Path(options.out).write_text(json.dumps(document(results), indent=1) + "\n")
    print(json.dumps(summary(results), indent=2))


def document(results: list[dict]) -> dict:
    return {
        "benchmark": "train_step",
        "command": command_line(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **environment(),
        "summary": summary(results),
        "runs": results,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help=f"a shape ({', '.join(SHAPES)}) or a model folder")
    parser.add_argument("--data", help="rows to tokenise; random documents without it")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--attention", default="auto", help="Slipstream's attention choice")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--nf4", action="store_true", help="base weights in four bits, for all arms")
    parser.add_argument("--out")
    parser.add_argument("--arms", default="slipstream,trl+liger", help=f"separated by commas: {', '.join(ARMS)}")
    parser.add_argument("--folder", default="/dev/shm/slipstream-bench", help="where weights for Unsloth are put")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def start_child(arm: str, number: int) -> subprocess.Popen:
    """A process that imports what ``arm`` needs and then waits for a line."""
    # Unsloth writes modules when it is imported: several at once would write the same ones.
    written = os.path.join(tempfile.gettempdir(), f"slipstream-bench-{os.getpid()}-{number}")
    command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env={**os.environ, "UNSLOTH_COMPILE_LOCATION": written}, **pipes)


def take_turn(arm: str, child: subprocess.Popen) -> dict:
    began = time.perf_counter()
    output, errors = child.communicate("now\n")
    for line in output.splitlines():
        if line.startswith("RESULT "):
            found = json.loads(line.removeprefix("RESULT "))
            return {**found, "turn_seconds": round(time.perf_counter() - began, 1)}
    return {"arm": arm, "error": (errors or output)[-1500:]}


def run_arm(options: argparse.Namespace) -> dict:
    import_all(options.arm)
    if not sys.stdin.readline():
        sys.exit("the process that hands out turns has ended")
    import torch

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        trainer, timer, counts = made(options, scratch)
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
    times, first = timer.seconds(), timer.first - began
    steady = times[WARM_UP:]
    tokens = statistics.mean(counts) if counts else options.tokens
    return {
        "arm": options.arm,
        "median_step_ms": round(statistics.median(steady) * 1e3, 2),
        "min_step_ms": round(min(steady) * 1e3, 2),
        "steps_timed": len(steady),
        "tokens_a_step": round(tokens),
        "tokens_per_second": round(tokens / statistics.median(steady)),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3),
        "first_step_seconds": round(first, 1),
        "times_ms": [round(t * 1e3, 1) for t in times],
        **({"decisions": trainer.told} if hasattr(trainer, "told") else {}),
    }


def import_all(arm: str) -> None:
    """What the arm will need, as far as it takes long."""
    if arm.startswith("unsloth"):
        import unsloth  # noqa: F401  # before transformers, which it changes
    if arm.startswith("slipstream"):
        import slipstream.bench.shapes  # noqa: F401
    else:
        import trl.trainer.sft_trainer  # noqa: F401
    if arm == "trl+liger":
        import liger_kernel.transformers  # noqa: F401
    import datasets  # noqa: F401
    from transformers import AutoModelForCausalLM, Trainer  # noqa: F401


def made(options: argparse.Namespace, scratch: str):
    """The arm's trainer, its clock, and the tokens of its rows where these differ."""
    if options.arm.startswith("unsloth"):
        return unsloth_arm(options, scratch)
    return trl_arm(options, scratch) if options.arm.startswith("trl") else slipstream_arm(options, scratch)


def slipstream_arm(options: argparse.Namespace, scratch: str):
    import torch
    from datasets import Dataset

    import slipstream
    from slipstream.bench.step_clock import StepClock
    from slipstream.model.lora import AdapterOptions, add_adapter

    model = add_adapter(base_model(options), AdapterOptions(rank=16, alpha=16), seed=0)
    activations = "recompute" if options.checkpointing else "keep"
    if options.arm == "slipstream:offload":
        activations = "offload"
    slipstream.apply(model, slipstream.Options(attention=options.attention, activations=activations))
    rows = slipstream.pack_dataset(Dataset.from_dict({"input_ids": documents(options)}), options.tokens)
    timer, told = StepClock(torch.device("cuda")), []
    trainer = slipstream.Trainer(
        model,
        training_arguments(options, scratch),
        train_dataset=rows,
        data_collator=slipstream.PackedCollator(tokens=options.tokens),
        compute_dtype=torch.bfloat16,
        mode=ARMS[options.arm],
        on_decision=lambda decision: told.append(str(decision)),
        callbacks=[timer],
    )
    trainer.told = told
    return trainer, timer, [sum(lengths) for lengths in rows["seq_lengths"]][: options.steps]


def trl_arm(options: argparse.Namespace, scratch: str):
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from slipstream.bench.step_clock import StepClock

    model = base_model(options)
    model.config.use_cache = False
    experts = options.arm.partition(":")[2]
    if experts:
        model.set_experts_implementation(experts)
    lora = LoraConfig(r=16, lora_alpha=16, target_modules=targets(options), lora_dropout=0.0, task_type="CAUSAL_LM")
    timer = StepClock(torch.device("cuda"))
    config = SFTConfig(
        **common(options, scratch),
        bf16=True,
        packing=True,
        max_length=options.tokens,
        use_liger_kernel=not experts,
        gradient_checkpointing=options.checkpointing,
        dataset_num_proc=1,
    )
    trainer = SFTTrainer(
        model,
        config,
        train_dataset=Dataset.from_dict({"input_ids": documents(options)}),
        processing_class=tokenizer(options),
        peft_config=lora,
        callbacks=[timer],
    )
    counts = [len(row) for row in trainer.train_dataset["input_ids"]]
    return trainer, timer, counts


def unsloth_arm(options: argparse.Namespace, scratch: str):
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel

    from slipstream.bench.step_clock import StepClock

    source = model_folder(options) if options.model in SHAPES else options.model
    model, processing = FastLanguageModel.from_pretrained(
        str(source),
        max_seq_length=options.tokens,
        load_in_4bit=options.nf4,
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    checkpointing = ("unsloth" if options.arm == "unsloth:offload" else True) if options.checkpointing else False
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        target_modules=targets(options),
        use_gradient_checkpointing=checkpointing,
    )
    timer, counts = StepClock(torch.device("cuda")), []
    config = SFTConfig(
        **common(options, scratch), bf16=True, packing=True, max_length=options.tokens, dataset_num_proc=1
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": documents(options)}),
        processing_class=processing,
        callbacks=[timer],
    )
    collate = trainer.data_collator

    class Counting:
        """Unsloth may pack otherwise than asked: count what its batches hold."""

        def __call__(self, examples):
            batch = collate(examples)
            counts.append(int(batch["input_ids"].numel()))
            return batch

        def __getattr__(self, name):
            return getattr(collate, name)

    trainer.data_collator = Counting()
    return trainer, timer, counts


def targets(options: argparse.Namespace) -> list[str]:
    """The linear layers with adapters; a mixture's experts have none, in any arm."""
    return ATTENTION if options.model in MIXTURES else [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def model_folder(options: argparse.Namespace) -> Path:
    return Path(options.folder) / f"{options.model}-{options.layers or 'all'}"


def save_model(options: argparse.Namespace) -> None:
    folder = model_folder(options)
    if not (folder / "config.json").exists():
        model = random_model(options)
        model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id = None, 1, 2
        model.save_pretrained(folder, max_shard_size="4GB")
        byte_tokenizer().save_pretrained(folder)


def training_arguments(options: argparse.Namespace, scratch: str):
    from transformers import TrainingArguments

    return TrainingArguments(**common(options, scratch))


def common(options: argparse.Namespace, scratch: str) -> dict:
    return {
        "output_dir": scratch,
        "max_steps": options.steps,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-4,
        "logging_steps": 1000,
        "report_to": "none",
        "save_strategy": "no",
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": 0,
        "disable_tqdm": True,
    }


def base_model(options: argparse.Namespace):
    if options.model in SHAPES and not options.nf4:
        return random_model(options)
    import torch
    from transformers import AutoModelForCausalLM

    from slipstream.model.quantize import nf4_config

    source = model_folder(options) if options.model in SHAPES else options.model
    four_bits = {"quantization_config": nf4_config(torch.bfloat16)} if options.nf4 else {}
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, device_map={"": 0}, **four_bits)


def random_model(options: argparse.Namespace):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(shape_config(options.model, options.layers), dtype=torch.bfloat16)


def tokenizer(options: argparse.Namespace):
    from transformers import AutoTokenizer

    return byte_tokenizer() if options.model in SHAPES else AutoTokenizer.from_pretrained(options.model)


def byte_tokenizer():
    """A tokenizer of 259 tokens, one a byte, for text before models with random weights; it has no chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{letter: index + 3 for index, letter in enumerate(alphabet)}}
    byte_level = Tokenizer(models.BPE(vocabulary, []))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    byte_level.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=byte_level, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def documents(options: argparse.Namespace) -> list[list[int]]:
    if options.data:
        from slipstream.data.rows import DataOptions
        from slipstream.data.tokens import tokenise

        rows = tokenise(options.data, DataOptions(train=options.data), tokenizer(options), max_length=options.tokens)
        found = rows.documents["input_ids"]
        needed = options.tokens * (options.steps + 2)
        return [list(ids) for ids in found] * (1 + needed // sum(map(len, found)))
    draw = random.Random(0)
    made = []
    for _ in range(options.steps + 2):
        left = options.tokens
        while left:
            length = min(max(16, int(draw.lognormvariate(5.2, 0.8))), left)
            length = left if left - length < 16 else length
            made.append([draw.randrange(3, 40000) for _ in range(length)])
            left -= length
    return made


def summary(results: list[dict]) -> dict:
    shown: dict = {}
    for arm in dict.fromkeys(run["arm"] for run in results):
        runs = [run for run in results if run["arm"] == arm and "error" not in run]
        if runs:
            best = statistics.median(run["median_step_ms"] for run in runs)
            shown[arm] = {
                "median_step_ms": best,
                "tokens_per_second": round(statistics.median(run["tokens_per_second"] for run in runs)),
                "peak_memory_gb": max(run["peak_memory_gb"] for run in runs),
            }
    ours, *others = [*shown] or [None]
    for other in others:
        ratio = shown[ours]["tokens_per_second"] / shown[other]["tokens_per_second"]
        shown[other]["ratio"] = round(ratio, 3)  # how many times as many tokens the first arm trains in a second
    return shown


def print_row(run: dict) -> None:
    if "error" in run:
        print(f"{run['arm']:20} failed: {run['error']}")
    else:
        print(
            f"{run['arm']:20} {run['median_step_ms']:8.1f} ms {run['tokens_per_second']:8,} tokens/s "
            f"{run['peak_memory_gb']:6.2f} GB",
            flush=True,
        )


def environment() -> dict:
    import torch

    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "accelerate", "trl", "liger-kernel", "unsloth"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {"device": torch.cuda.get_device_name(), "versions": versions}


def command_line() -> str:
    """The command without where its output went and where its data lay."""
    words = sys.argv[1:]
    if "--out" in words:
        at = words.index("--out")
        words = words[:at] + words[at + 2 :]
    return " ".join(["python benchmarks/bench_train_step.py", *(Path(w).name if "/" in w else w for w in words)])


def commit() -> str:
    """The commit measured; ``SLIPSTREAM_COMMIT`` names it where the tree has come without its history."""
    if told := os.environ.get("SLIPSTREAM_COMMIT"):
        return told
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
