"""How a model carries boundaries to its attention: found out before the first step, on a row of two tiny documents.

Most models hand unknown keyword arguments down to their attention modules, so that ``segments`` arrives there. A few
drop them on the way but do pass a 4-D mask, which serves for ``sdpa``. Others call no registered attention at all. The
probe registers a function that computes nothing and writes down what it was given; the alternative, to trust a list of
model types, goes stale with every release.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import sdpa_mask

from slipstream.device.segments import Segments
from slipstream.model.rotary import by_document, by_row

Carrier = Literal["segments", "mask"]
PROBE = "slipstream_probe"
LENGTHS = (3, 4)


@dataclass
class _Heard:
    """Attention modules, by ``id``, and what reached them."""

    segments: set[int] = field(default_factory=set)
    mask: set[int] = field(default_factory=set)


def find_carrier(base: Any) -> tuple[Carrier | None, str]:
    """What brings boundaries to every attention module of ``base``, or None, and the reason in a few words.

    A model on meta tensors is asked in the same way, for shapes alone are computed, but of layers that are alike only
    the first. One whose forward looks at values, which aren't there, is taken to carry segments.
    """
    decoder = base.get_decoder()
    parameter = next(decoder.parameters())
    if parameter.is_meta:
        with _layers_that_differ(decoder):
            answer = _ask(base, decoder, parameter)
        if answer[0] is not None:
            return answer
    return _ask(base, decoder, parameter)


def _ask(base: Any, decoder: Any, parameter: torch.Tensor) -> tuple[Carrier | None, str]:
    """What ``find_carrier`` gives, of the decoder's layers as they are."""
    # all ones: none that a model makes by itself looks like that
    mask = torch.ones((1, 1, sum(LENGTHS), sum(LENGTHS)), dtype=torch.bool, device=parameter.device)
    try:
        heard = _listen(base, decoder, mask)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        if parameter.is_meta:
            return "segments", "known to reach every attention module only once weights are loaded"
        return None, f"a row of two documents fails in it: {type(error).__name__}: {error}"
    expected = attention_modules(decoder)
    total = max(len(expected), getattr(decoder.config, "num_hidden_layers", 0))
    if len(heard.segments) >= total and set(expected) <= heard.segments:
        return "segments", "segments reach every attention module"
    if len(heard.mask) >= total and set(expected) <= heard.mask and not _windows(base.config.get_text_config()):
        return "mask", "its attention is handed a mask but no segments"
    reached = max(len(heard.segments), len(heard.mask))
    return None, f"boundaries reach {reached} of its {total} attention modules: documents would see each other"


def attention_modules(decoder: nn.Module) -> dict[int, str]:
    """The decoder's attention modules: ``id`` → name."""
    return {id(m): name for name, m in decoder.named_modules() if type(m).__name__.endswith("Attention")}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both hold the same, on whichever devices: a model over several devices moves what it is given.

    Meta tensors hold nothing, and are the same if they are one storage.
    """
    if one.is_meta or other.is_meta:
        storages = {one.untyped_storage()._cdata, other.untyped_storage()._cdata}
        return one.dtype == other.dtype and one.shape == other.shape and len(storages) == 1
    return one.dtype == other.dtype and torch.equal(one.to(other.device), other)


def _windows(config: Any) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(kinds - {"full_attention"}) or getattr(config, "sliding_window", None) is not None


@contextmanager
def _layers_that_differ(decoder: Any) -> Iterator[None]:
    """The decoder without its last layers, as far as each is like one before: shapes are computed in Python, slowly."""
    layers, config = getattr(decoder, "layers", None), decoder.config
    depth = getattr(config, "num_hidden_layers", None)
    kinds = list(getattr(config, "layer_types", None) or [None] * (depth or 0))
    if not isinstance(layers, nn.ModuleList) or not len(layers) == depth == len(kinds):
        yield
        return
    marks = [(kind, *map(type, layer.modules())) for kind, layer in zip(kinds, layers, strict=True)]
    count = 1 + max(map(marks.index, marks))
    decoder.layers, config.num_hidden_layers = layers[:count], count
    try:
        yield
    finally:
        decoder.layers, config.num_hidden_layers = layers, depth


@contextmanager
def _experts_passed_over(base: Any, passed_over: bool) -> Iterator[None]:
    """Experts that compute nothing: which tokens go to them is told by values, and a model on meta tensors has none."""
    if not passed_over or not base._can_set_experts_implementation():
        yield
        return
    before = base.get_experts_implementation()
    ExpertsInterface.register(PROBE, lambda _, hidden, *__: torch.zeros_like(hidden))
    base.set_experts_implementation(PROBE)
    try:
        yield
    finally:
        base.set_experts_implementation(before)


def _listen(base: Any, decoder: Any, mask: torch.Tensor) -> _Heard:
    heard = _Heard()

    def note(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        segments: Segments | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        if segments is not None:
            heard.segments.add(id(module))
        if attention_mask is not None and _same(attention_mask, mask):
            heard.mask.add(id(module))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(PROBE, note)
    AttentionMaskInterface.register(PROBE, sdpa_mask)
    before, training = base.config._attn_implementation, {module: module.training for module in base.modules()}
    segments = Segments.from_lengths(LENGTHS).on(mask.device)
    ids = torch.ones((1, sum(LENGTHS)), dtype=torch.int64, device=mask.device)
    rotary = by_document(decoder, lambda: segments)  # the model's own would remember the probe's length
    base.eval()
    base.set_attn_implementation(PROBE)
    try:
        with torch.no_grad(), _experts_passed_over(base, mask.is_meta):
            decoder(
                input_ids=ids,
                position_ids=segments.position_ids(),
                attention_mask=mask,
                segments=segments,
                use_cache=False,
            )
    finally:
        base.set_attn_implementation(before)
        by_row(rotary)
        for module, mode in training.items():
            module.training = mode
    return heard
