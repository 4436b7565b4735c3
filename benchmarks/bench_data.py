"""A million rows from Parquet to packed rows: seconds on all cores, and the memory that they take.

    python benchmarks/bench_data.py                                    # 1,000,000 conversations, tokenizer made here
    python benchmarks/bench_data.py --rows 100000 --tokenizer path/to/model --window 50000

Makes the Parquet file first (not timed), then tokenises it through a chat template and packs it a window at a time.
Memory is what processes keep for themselves, mapped files not counted, as the largest of samples taken meanwhile.
Prints a table; the last line is the result in JSON, which ``--out`` writes too.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from slipstream.bench.document import document
from slipstream.data.packing import pack_dataset
from slipstream.data.rows import DataOptions
from slipstream.data.tokens import tokenise
from slipstream.data.workers import MOST, cores

PATHS = ("--out", "--scratch")
WORDS = ("model", "row", "token", "step", "card", "batch", "loss", "layer", "weight", "learns", "from", "the", "a")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        source = Path(folder) / "rows.parquet"
        write_rows(source, options.rows)
        tokenizer = tokenizer_of(options)
        cache = Path(folder) / "cache"
        with sampled() as memory:
            began = time.perf_counter()
            how = DataOptions(train="", chat_template=None if options.tokenizer else TEMPLATE)
            told = tokenise(str(source), how, tokenizer, max_length=4096, cache_dir=cache, progress=progress)
            tokenised = time.perf_counter() - began
            rows = pack_dataset(told.documents, 4096, window=options.window, cache_dir=cache)
            packed = time.perf_counter() - began - tokenised
    row = {
        "documents": options.rows,
        "window": options.window,
        "cores": cores(),
        "processes": min(cores(), MOST),
        "tokens": told.account.tokens,
        "packed_rows": len(rows),
        "tokenise_seconds": round(tokenised, 2),
        "rows_per_second": round(options.rows / tokenised),
        "pack_seconds": round(packed, 2),
        "peak_memory_mb": round(memory["own"] / 2**20),
        "peak_memory_mb_with_workers": round(memory["all"] / 2**20),
    }
    result = document("data", torch.device("cpu"), [row])
    result["command"] = " ".join(["python benchmarks/bench_data.py", *without_paths(sys.argv[1:])])
    print(
        f"{options.rows:,} rows, {told.account.tokens:,} tokens on {row['cores']} cores: tokenised in "
        f"{tokenised:.1f} s ({row['rows_per_second']:,} rows/s), packed in {packed:.1f} s; "
        f"at most {row['peak_memory_mb']:,} MB, {row['peak_memory_mb_with_workers']:,} MB with all processes"
    )
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def without_paths(words: list[str]) -> list[str]:
    """The command's words without where files lay."""
    kept: list[str] = []
    for word, before in zip(words, ["", *words], strict=False):
        if word not in PATHS and before not in PATHS:
            kept.append(word)
    return kept


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--window", type=int, default=100_000)
    parser.add_argument("--tokenizer", help="a model folder or hub id; a byte-level one is made without it")
    parser.add_argument("--scratch", help="where files are written")
    parser.add_argument("--out")
    return parser.parse_args()


def write_rows(path: Path, rows: int) -> None:
    """Conversations of one to three turns, about 250 characters each, in row groups of 10,000."""
    draw = random.Random(0)
    schema = pa.schema([("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))])
    with pq.ParquetWriter(path, schema) as writer:
        for at in range(0, rows, 10_000):
            group = [{"messages": conversation(draw)} for _ in range(min(10_000, rows - at))]
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def conversation(draw: random.Random) -> list[dict[str, str]]:
    turns = draw.randint(1, 3)
    return [
        {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(5, 40)))}
        for _ in range(turns)
        for role in ("user", "assistant")
    ]


def tokenizer_of(options: argparse.Namespace) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if options.tokenizer:
        return AutoTokenizer.from_pretrained(options.tokenizer)
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")


def progress(rows: int, total: int | None) -> None:
    if rows % 51_200 == 0:
        print(f"  {rows:,} of {total or 0:,} rows", file=sys.stderr, flush=True)


@contextmanager
def sampled():
    """The largest memory of this process alone, and with its children, in bytes, while the context lasts."""
    most = {"own": 0, "all": 0}
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.2):
            own = private_bytes("self")
            most["own"] = max(most["own"], own)
            most["all"] = max(most["all"], own + sum(private_bytes(child) for child in children()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def private_bytes(process: str) -> int:
    """Memory that the process keeps for itself (Linux's RssAnon); 0 where it has gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def children() -> list[str]:
    return [child for task in Path("/proc/self/task").iterdir() for child in read(task / "children").split()]


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
