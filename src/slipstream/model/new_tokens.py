"""Tokens that the model has not learned: room for them in its matrices, and their rows trained beside the adapter.

A tokenizer may know more tokens than the checkpoint has embeddings for, and a recipe may add some
(``load.new_tokens``). The matrices then grow (to a multiple of 8 rows, which matrix products like), new rows begin as
the mean of the old ones, and peft trains just those rows of embedding and head (``trainable_token_indices``): a few
thousand numbers where ``adapter.modules_to_save: [embed_tokens, lm_head]`` trains and saves both matrices whole. Either
way plain peft loads the adapter, onto a base with as many rows (``resize_token_embeddings`` with
``pad_to_multiple_of=8``; an adapter's card has the number).

peft's own layer copies the whole matrix in every call, and brings its row numbers to the device each time, which the
host waits for. ``without_copies`` gives its instances a forward that reads the matrix as it is.

    embedding   where(token is new, its row of the delta, its row of the matrix)
    head        hidden @ matrixᵀ, with the new tokens' columns replaced by hidden @ deltaᵀ

Shapes: N new tokens, V vocabulary, H hidden width.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.errors import InputError

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

MULTIPLE = 8
"""Rows that the matrices grow to a multiple of: 16 bytes of half precision, which fast matrix kernels align to."""


def check_named(tokens: Sequence[str]) -> None:
    """Raises ``InputError`` for ``load.new_tokens`` that are blank, or named more than once."""
    problems = [
        f"item {place} of {len(tokens)} is {token!r}, nothing but blanks; name tokens such as <think>"
        for place, token in enumerate(tokens, start=1)
        if not token.strip()
    ]
    problems += [
        f"{token!r} is named {times} times (items {_items(tokens, token)}); name it once"
        for token, times in Counter(tokens).items()
        if times > 1 and token.strip()
    ]
    if problems:
        raise InputError(f"load.new_tokens: {'; '.join(problems)}")


def _items(tokens: Sequence[str], wanted: str) -> str:
    """The places of a token in the list, counted from 1."""
    *first, last = [str(place) for place, token in enumerate(tokens, start=1) if token == wanted]
    return f"{', '.join(first)} and {last}"


def check_vocabulary(config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerBase", model: str) -> None:
    """Raises ``InputError`` where the tokenizer's own vocabulary, tokens added to it left out, goes beyond the model's.

    Added tokens get rows (``fit_vocabulary``); thousands of own ones without rows mean the tokenizer of another model.
    """
    rows = getattr(config.get_text_config(), "vocab_size", None)
    added = set(tokenizer.get_added_vocab().values())
    largest = max((token for token in tokenizer.get_vocab().values() if token not in added), default=-1)
    if isinstance(rows, int) and largest >= rows:
        raise InputError(
            f"model: the config of {model} has vocab_size {rows:,}, and its tokenizer gives ids up to {largest:,}: the "
            "last have no embedding; mend vocab_size in config.json, or put the model's own tokenizer beside it"
        )


def rows_needed(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Rows that the tokenizer's ids reach into: more than it has tokens, where it leaves ids out."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def new_token_ids(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", named: Sequence[str]) -> list[int]:
    """Tokens whose rows have to be learned: those ``named``, and those that the checkpoint has no row for. Sorted."""
    rows = model.get_input_embeddings().weight.shape[0]
    known = {int(tokenizer.convert_tokens_to_ids(token)) for token in named}
    return sorted(known | {token for token in tokenizer.get_vocab().values() if token >= rows})


def fit_vocabulary(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Give the model a row for every token, in place; new rows are the mean of the old. Never takes rows away."""
    import torch

    rows, needed = model.get_input_embeddings().weight.shape[0], rows_needed(tokenizer)
    if needed <= rows:
        return
    model.resize_token_embeddings(needed, pad_to_multiple_of=MULTIPLE, mean_resizing=False)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            if module is not None:
                module.weight[rows:] = module.weight[:rows].float().mean(0).to(module.weight.dtype)


def trainable_rows(
    model: "PreTrainedModel", token_ids: Sequence[int], whole: Sequence[str]
) -> dict[str, list[int]] | None:
    """``token_ids`` for each matrix, by its name, as peft's ``trainable_token_indices``; None where there is nothing.

    Not for a matrix that is trained ``whole``, nor for a head that is the embedding's own tensor.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    matrices = [embedding] if head is None or head.weight is embedding.weight else [embedding, head]
    names = {id(module): name for name, module in model.named_modules()}
    rows = {names[id(module)]: list(token_ids) for module in matrices}
    kept = {name: ids for name, ids in rows.items() if not any(_is_named(name, wanted) for wanted in whole)}
    return kept if token_ids and kept else None


def without_copies(model: "nn.Module") -> None:
    """Have peft's layers of trained token rows compute without a copy of their matrix and without a host sync."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for module in model.modules():
        if isinstance(module, TrainableTokensLayer):
            module.forward = partial(_forward, module)


def without_matrices(adapted: "PeftModel") -> None:
    """Have the adapter saved without the grown matrices, which peft would add to it: what is trained is beside them."""
    adapted.save_pretrained = partial(adapted.save_pretrained, save_embedding_layers=False)


def _is_named(module: str, wanted: str) -> bool:
    return module == wanted or module.endswith(f".{wanted}")


def _forward(layer: Any, inputs: "torch.Tensor") -> "torch.Tensor":
    """What peft's layer gives: token ids [...] → rows [..., H], or hidden states [..., H] → logits [..., V]."""
    from torch import nn

    active = layer.active_adapters
    if layer.disable_adapters or layer.merged or len(active) != 1 or active[0] not in layer.token_indices:
        plain: torch.Tensor = layer.forward_adapters(inputs, active)
        return plain
    output: torch.Tensor = layer.base_layer(inputs)
    delta_NH = layer.trainable_tokens_delta[active[0]]
    ids_N = _ids_on(layer, active[0], output.device)
    embeds = isinstance(layer.base_layer, nn.Embedding)
    return _rows(layer, inputs, output, delta_NH, ids_N) if embeds else _columns(inputs, output, delta_NH, ids_N)


def _ids_on(layer: Any, adapter: str, device: "torch.device") -> "torch.Tensor":
    """The new tokens' ids, int64 [N], copied to the device once."""
    import torch

    kept: dict[Any, torch.Tensor] = vars(layer).setdefault("_slipstream_ids", {})
    if (adapter, device) not in kept:
        kept[adapter, device] = torch.tensor(layer.token_indices[adapter], device=device)
    return kept[adapter, device]


def _rows(
    layer: Any, tokens: "torch.Tensor", output: "torch.Tensor", delta_NH: "torch.Tensor", ids_N: "torch.Tensor"
) -> "torch.Tensor":
    import torch
    import torch.nn.functional as F

    is_new = tokens[..., None] == ids_N
    row = is_new.int().argmax(-1)
    scale = layer._get_embed_scale()
    new = F.embedding(row, delta_NH).to(output.dtype)
    return torch.where(is_new.any(-1, keepdim=True), new if scale is None else new * scale.to(new.dtype), output)


def _columns(
    hidden: "torch.Tensor", logits: "torch.Tensor", delta_NH: "torch.Tensor", ids_N: "torch.Tensor"
) -> "torch.Tensor":
    import torch.nn.functional as F

    return logits.index_copy(-1, ids_N, F.linear(hidden, delta_NH.to(hidden.dtype)).to(logits.dtype))
