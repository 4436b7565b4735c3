"""What ``run.json`` holds (what was run, on what, with what data and decisions), and the card of an adapter."""

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from slipstream.cost.hardware import describe
from slipstream.decision import Decision
from slipstream.model.base_weights import base_digest
from slipstream.model.gguf import SUFFIX
from slipstream.model.load import LoadOptions
from slipstream.model.trainable import trainable_summary
from slipstream.prepare import Rows
from slipstream.recipe import Recipe
from slipstream.recipe_paths import with_absolute_paths
from slipstream.transform import base_model
from slipstream.versions import SLIPSTREAM, library_versions


def describe_run(
    recipe: Recipe,
    model: nn.Module,
    device: torch.device,
    train_rows: Rows,
    eval_rows: Rows | None,
    decided: list[Decision],
    *,
    new_tokens: Sequence[int] = (),
) -> dict[str, Any]:
    """What run.json holds before the first step; ``new_tokens``: those whose rows are learned."""
    summary, base = trainable_summary(model), base_model(model)
    sets = {"train": train_rows, "eval": eval_rows}
    return {
        "format": 1,
        "slipstream": SLIPSTREAM,
        "started": now(),
        "finished": None,
        "outcome": "running",
        "recipe": with_absolute_paths(recipe).to_dict(),
        "versions": {"python": platform.python_version(), **library_versions()},
        "device": asdict(describe(device)),
        "decisions": [asdict(decision) for decision in decided],
        "rows": {name: rows and rows_digest(rows) for name, rows in sets.items()},
        "contents": {name: rows and rows.tokenised.content for name, rows in sets.items()},
        "data": {name: rows and asdict(rows.tokenised.account) for name, rows in sets.items()},
        "packing": {
            name: rows and {**asdict(rows.report), "length_histogram": rows.histogram} for name, rows in sets.items()
        },
        "parameters": {"trainable": summary.trainable, "total": summary.total},
        "base": {
            "name": base.name_or_path,
            "digest": base_digest(str(base.name_or_path), recipe.load.revision),
            "dtype": str(base.dtype).removeprefix("torch."),
            "rows": base.get_input_embeddings().weight.shape[0] if new_tokens else None,
        },
        "eval_before": None,
        "eval_after": None,
        "best": None,
    }


def rows_digest(rows: Rows) -> str:
    """Every document's length, and the tokens and labels of 64 spread over the set: all that older runs, which lack
    ``contents``, can be compared by.
    """
    documents = rows.tokenised.documents
    digest = hashlib.sha256(rows.tokenised.lengths.tobytes())
    for index in range(0, len(documents), max(1, len(documents) // 64)):
        document = documents[index]
        digest.update(repr((document["input_ids"], document["labels"])).encode())
    return digest.hexdigest()[:32]


def now() -> str:
    """The time, as run.json writes it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def model_card(recipe: Recipe, documents: int, base: Mapping[str, Any]) -> str:
    """The README of an adapter: what it was trained on, by which recipe, and how peft loads it onto its base.

    ``base``: what run.json says of it.
    """
    return (
        f"---\nlibrary_name: peft\n---\n\n# Adapter for {recipe.model}\n\nTrained with Slipstream {SLIPSTREAM} on "
        f"`{recipe.data.train}` ({documents:,} documents).\n\nFrom this folder, with peft and transformers alone:\n\n"
        f"```python\n{_loading(recipe.load, base)}```\n\nThe recipe:\n\n```yaml\n{recipe.to_yaml()}```\n"
    )


def _loading(options: LoadOptions, base: Mapping[str, Any]) -> str:
    """The lines of Python that load an adapter, from its own folder."""
    model, rows = _base_arguments(options, base), base["rows"]
    quantised = "BitsAndBytesConfig" in model
    lines = [
        *(["import torch"] if quantised else []),
        "from peft import PeftModel",
        f"from transformers import AutoModelForCausalLM, AutoTokenizer{', BitsAndBytesConfig' if quantised else ''}",
        "",
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        f"base = AutoModelForCausalLM.from_pretrained({model})",
    ]
    if rows is not None:  # names the number: with modules_to_save, peft refuses any other
        lines.append(
            f"base.resize_token_embeddings({rows}, mean_resizing=False)  # room for new tokens, as in training"
        )
    return "\n".join([*lines, 'model = PeftModel.from_pretrained(base, ".")', ""])


def _base_arguments(options: LoadOptions, base: Mapping[str, Any]) -> str:
    """How transformers is told of the base: a GGUF file by its folder, the rest as the recipe has it."""
    name, dtype = str(base["name"]), base["dtype"]
    where = [repr(name)]
    if name.endswith(SUFFIX):
        where = [repr(os.path.dirname(name)), f"gguf_file={os.path.basename(name)!r}"]
    if options.revision is not None:
        where.append(f"revision={options.revision!r}")
    if options.trust_remote_code:
        where.append("trust_remote_code=True")
    if options.quantize == "nf4":
        four_bits = 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True'
        where.append(f"quantization_config=BitsAndBytesConfig({four_bits}, bnb_4bit_compute_dtype=torch.{dtype})")
    return ", ".join([*where, f'dtype="{dtype}"'])
