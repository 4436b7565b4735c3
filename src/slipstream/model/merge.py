"""A tuned model as a folder that plain transformers loads: an adapter added to the weights it was trained on.

peft adds the adapter; what is taken care of here is what a sum in place gets wrong. Where one tensor serves as
embedding and as head, an adapter on one of them would change the other too, so they part first. And the sum is rounded
once: a base in the dtype asked for is added to in float32 and rounded as it is written back, any other is added to as a
float32 model and rounded at the end. The price of the second is 4 bytes a parameter of host memory. The alternative,
peft's safe merge, rounds the difference and then the sum.

    1. target   ``unused_folder``    nothing is overwritten
    2. scratch  ``written_whole``    a folder beside it, renamed when complete
    3. sum      ``merge_adapter``
    4. files    ``save_model``       if they fit on the disk
"""

import errno
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slipstream.errors import InputError
from slipstream.full_disk import FullDiskTold
from slipstream.model.base_weights import check_shape
from slipstream.model.lora import load_adapter
from slipstream.permissions import as_umask_says

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MergedDtype = Literal["float32", "bfloat16", "float16"]
"""What a merged model's weights can be saved in."""
FOR_OTHER_FILES = 64 * 2**20
"""Bytes for what lies beside the weights: configurations, tokenizer, headers."""


def unused_folder(out: Path) -> Path:
    """The absolute path of a folder to be made. ``InputError`` where something is: an empty folder is nothing."""
    target = Path(os.path.abspath(out.expanduser()))
    if target.is_symlink() or target.is_mount():
        kind = "a link" if target.is_symlink() else "a mount point"
        raise InputError(f"--out '{out}' is {kind}, which cannot be replaced; name a new folder inside it")
    if target.exists() and not target.is_dir():
        raise InputError(f"--out '{out}' is a file; choose another --out")
    found = sorted(entry.name for entry in target.iterdir()) if target.is_dir() else []
    if found:
        more = f" and {len(found) - 1:,} more" if len(found) > 1 else ""
        raise InputError(f"--out '{out}' is not empty ('{found[0]}'{more}); choose another --out, or empty it")
    return target


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Give a folder to write to, which becomes ``target`` at the end; after an exception nothing is left of it.

    ``InputError`` where ``target`` cannot be made, or the disk is full.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent)
    except OSError as error:
        raise InputError(f"--out '{target}' cannot be made ({error.strerror}); choose another --out") from error
    with scratch as name, _told(target):
        built = Path(name) / target.name
        built.mkdir()
        yield built
        as_umask_says(built)
        built.rename(target)


def merge_adapter(
    base: "PreTrainedModel", adapter: Path, *, dtype: MergedDtype, base_parameters: int
) -> "PreTrainedModel":
    """The base model with the adapter in ``adapter`` added to its weights, in ``dtype``; ``base`` is used up.

    ``base`` is in ``dtype`` already or in float32, and has ``base_parameters`` parameters, as when the adapter was
    trained. Raises ``InputError`` for another base model, one with quantised weights, or a damaged adapter.
    """
    _check_base(base, adapter, base_parameters)
    loaded = {name: parameter.dtype for name, parameter in base.named_parameters()}
    own = base.dtype
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*tie_word_embeddings")  # the very thing that is done here
        warnings.filterwarnings("ignore", message="All adapters are already merged")  # those on experts are
        adapted = load_adapter(base, adapter)
        _part_head_from_embedding(adapted.get_base_model())
        _merge_experts(adapted)
        merged: PreTrainedModel = adapted.merge_and_unload()
    _say_whether_tied(merged)
    _cast(merged, dtype, {name for name, held in loaded.items() if held != own})
    return merged


def weight_bytes(model: "PreTrainedModel") -> int:
    """Bytes that the model's weights take in a file, shared ones once."""
    sizes = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()}
    return sum(sizes.values())


def save_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Weights (safetensors), configuration, generation configuration, tokenizer and chat template, into ``folder``.

    Raises ``InputError`` before anything is written if they do not fit on the disk.
    """
    from transformers import GenerationConfig

    needed, free = weight_bytes(model) + FOR_OTHER_FILES, shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"the merged model takes {needed / 1e9:,.2f} GB, and {folder.parent.parent} has {free / 1e9:,.2f} GB free; "
            "make room, or choose an --out on a larger disk"
        )
    generation = model.generation_config
    model.generation_config = GenerationConfig()  # saving holds it to rules that some published ones break
    model.save_pretrained(folder)
    model.generation_config = generation
    generation.to_json_file(folder / "generation_config.json", use_diff=True)
    tokenizer.save_pretrained(folder)


@contextmanager
def _told(target: Path) -> Iterator[None]:
    """Turn a full disk, and a target that somebody filled meanwhile, into ``InputError``."""
    remedy = "make room, or choose an --out on a larger disk"
    try:
        with FullDiskTold(target.parent, lambda room: f"no space left for '{target}': {room}; {remedy}"):
            yield
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise InputError(f"--out '{target}' was taken by another meanwhile; choose another --out") from error
        raise


def _check_base(base: Any, adapter: Path, base_parameters: int) -> None:
    if getattr(base, "hf_quantizer", None) is not None:
        method = getattr(base.hf_quantizer.quantization_config, "quant_method", "quantised")
        raise InputError(
            f"the weights of {base.name_or_path} are quantised ({getattr(method, 'value', method)}), and an adapter "
            f"can only be added to plain ones; load {adapter} beside the model with peft instead"
        )
    check_shape(base, adapter, base_parameters)


def _part_head_from_embedding(base: Any) -> None:
    """Give the head a tensor of its own where it shares the embedding's and one of them has an adapter."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    if not isinstance(head, BaseTunerLayer) and not isinstance(embedding, BaseTunerLayer):
        return
    layer: Any = head.get_base_layer() if isinstance(head, BaseTunerLayer) else head
    layer.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _merge_experts(adapted: "PeftModel") -> None:
    """Add the adapters on experts' stacked matrices in float32, a stack at a time; peft rounds before it adds."""
    from peft.tuners.lora.layer import ParamWrapper

    for module in adapted.modules():
        if isinstance(module, ParamWrapper):
            stack = module.get_param()
            held = stack.dtype
            stack.data = stack.data.float()
            module.merge()
            stack.data = stack.data.to(held)


def _say_whether_tied(model: Any) -> None:
    """Have the configuration tell what became of a shared tensor, so that loading does not tie it again."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        model.config.tie_word_embeddings = False
        model.config.get_text_config().tie_word_embeddings = False


def _cast(model: "PreTrainedModel", dtype: str, kept: set[str]) -> None:
    """All weights in ``dtype``, but for those that the model keeps in another of its own."""
    import torch

    wanted: torch.dtype = getattr(torch, dtype)
    for name, parameter in model.named_parameters():
        if name not in kept and parameter.is_floating_point():
            parameter.data = parameter.data.to(wanted)
