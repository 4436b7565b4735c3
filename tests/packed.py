"""Documents, the row they are packed into, and the plain path that the packed one is compared with."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from slipstream.device.feed import PackedCollator
from tiny import tiny_model

LENGTHS = (9, 1, 17, 5, 1, 12)
TOKENS = 48
"""Three more than the documents hold: the row has padding."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3": {},
    "mistral": {"sliding_window": 4},
}
WINDOWS = {"llama": {None}, "qwen2": {None, 4}, "qwen3": {None}, "mistral": {4}}


def model_of(family: str, seed: int = 0, **overrides: Any) -> Any:
    """The same tiny model whenever it is asked for with the same seed."""
    torch.manual_seed(seed)
    return tiny_model(family, **{**FAMILIES.get(family, {}), **overrides}).train()


def with_adapter(model: Any, dropout: float = 0.0) -> Any:
    """The same adapter whenever it is asked for; random on both sides, so that every part has a gradient."""
    torch.manual_seed(1)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_dropout=dropout))


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[dict[str, list[int]]]:
    """Random documents with labels; about a third of the tokens is not learned."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(5, 300, (length,), generator=draw)
        learned = torch.rand(length, generator=draw) < 0.67
        made.append({"input_ids": ids.tolist(), "labels": torch.where(learned, ids, -100).tolist()})
    return made


def row_of(examples: Sequence[dict[str, list[int]]], tokens: int = TOKENS) -> dict[str, Any]:
    return PackedCollator(tokens=tokens)(examples)


def logits_of(model: nn.Module, row: dict[str, Any]) -> torch.Tensor:
    """[1, T, V], without the model's own loss."""
    return model(**{name: value for name, value in row.items() if name != "labels"}).logits


def logits_alone(model: nn.Module, examples: Sequence[dict[str, list[int]]]) -> torch.Tensor:
    """[documents' tokens, V]: each document by itself through the plain model."""
    return torch.cat([model(input_ids=torch.tensor([example["input_ids"]])).logits[0] for example in examples])


def summed_loss_alone(model: nn.Module, examples: Sequence[dict[str, list[int]]]) -> tuple[torch.Tensor, int]:
    """The summed cross-entropy of predicting each document's labels from what is before them, and their count."""
    total, count = torch.zeros(()), 0
    for example in examples:
        logits = model(input_ids=torch.tensor([example["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(example["labels"][1:], dtype=torch.int64)
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        count += int((labels != -100).sum())
    return total, count


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], relative: float) -> None:
    """Each parameter's gradient, by its norm; those that are nothing but rounding by the norm of all."""
    assert ours.keys() == theirs.keys()
    assert theirs
    whole = torch.stack([g.norm() for g in theirs.values()]).norm()
    assert whole > 0
    for name, expected in theirs.items():
        error = (ours[name] - expected).norm()
        assert error <= relative * expected.norm() + 1e-2 * relative * whole, f"{name}: {error / expected.norm():.1e}"
