"""What ``run.json`` holds (what was run, on what, with what data and decisions), and the card of an adapter."""

import hashlib
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from slipstream.cost.hardware import describe
from slipstream.decision import Decision
from slipstream.model.base_weights import base_digest
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
) -> dict[str, Any]:
    """What run.json holds before the first step."""
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
        "base": {"name": base.name_or_path, "digest": base_digest(str(base.name_or_path), recipe.load.revision)},
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


def model_card(recipe: Recipe, documents: int) -> str:
    """The README of an adapter: what it was trained on, by which recipe."""
    return (
        f"---\nlibrary_name: peft\n---\n\n# Adapter for {recipe.model}\n\nTrained with Slipstream {SLIPSTREAM} on "
        f"`{recipe.data.train}` ({documents:,} documents). The recipe:\n\n```yaml\n{recipe.to_yaml()}```\n"
    )
