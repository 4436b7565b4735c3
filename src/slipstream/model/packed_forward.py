"""The packed forward: hooks that bring a batch's boundaries to where a model reads them.

The decoder's pre-hook puts ``segments`` on the input's device and stops transformers from looking for packed sequences
itself (with a 4-D mask: with ``None`` it compares position ids on the device and waits for the answer). The post-hook
counts at the first packed forward that every attention module did read the boundaries; it is on the outer model too,
since some models keep unknown arguments from their decoder. Lengths that come without segments are refused
(``lengths_argument.py``). A model that drops the boundaries on the way would train with documents that see each other,
without an error: it is refused instead.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from slipstream.decision import Decision
from slipstream.device.segments import Segments
from slipstream.errors import InputError
from slipstream.model.attention import mask_placeholder
from slipstream.model.attention.call import Boundaries
from slipstream.model.carrier import Carrier, attention_modules
from slipstream.model.lengths_argument import LengthsArgument, refuse_without_segments
from slipstream.model.rotary import by_document, by_row


@dataclass
class PackedForward:
    """What joins one model's forward to its batches' segments; ``attach`` and ``detach`` are each called once."""

    packing: Decision
    """Whether this model may be given segments, and why not."""
    attention: str | None
    """The key under which our attention is registered; None where the model's own was left."""
    carrier: Carrier | None
    current: Segments | None = None
    """The segments of the packed forward at hand, for modules that are handed nothing (rotary positions)."""
    rotary: list[nn.Module] = field(default_factory=list)
    hooks: list[RemovableHandle] = field(default_factory=list)
    lengths: LengthsArgument | None = None
    """The model's forward, which names ``seq_lengths``."""
    checked: bool = False
    decoder: Any = None
    """Where segments go in."""

    def attach(self, model: nn.Module, base: Any) -> None:
        """Hooks on the decoder, which all calls reach, and on the models around it, which may keep segments from it."""
        decoder = self.decoder = base.get_decoder()
        self.lengths = LengthsArgument(base)
        self.lengths.attach()
        if self.packing.on:
            self.rotary = by_document(decoder, lambda: self.current)
        # in the order in which they run: of hooks that were put first, PyTorch 2.11, where it compiles a whole model,
        # takes one for another
        around = list(dict.fromkeys((decoder, base, model)))
        self.hooks = [module.register_forward_pre_hook(self._refuse, with_kwargs=True) for module in around]
        self.hooks.append(decoder.register_forward_pre_hook(self._enter, with_kwargs=True))
        if base.config.get_text_config() is not base.config:
            self.hooks.append(base.register_forward_pre_hook(self._spare_mask, with_kwargs=True))
        self.hooks += [module.register_forward_hook(self._leave, with_kwargs=True) for module in around]

    def detach(self) -> None:
        """Remove every hook and put the model's and the rotary modules' own forwards back."""
        for hook in self.hooks:
            hook.remove()
        if self.lengths is not None:
            self.lengths.detach()
        by_row(self.rotary)

    def _refuse(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_without_segments(kwargs)
        if kwargs.get("segments") is None:
            return
        mask = kwargs.get("attention_mask")
        if mask is not None and not (module is self.decoder and _is_placeholder(mask)):
            raise InputError(
                f"attention_mask of shape {_shape(mask)} beside segments: a mask would make the boundaries ambiguous; "
                f"give one of them (PackedCollator makes no mask)"
            )
        if not self.packing.on:
            raise InputError(f"this model can't be trained packed: {self.packing.reason}")

    def _spare_mask(
        self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Keep a model of several parts from making T x T masks for its decoder, which would be laid aside there."""
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        if kwargs.get("segments") is None or tokens is None:
            return None
        return args, dict(kwargs, attention_mask=mask_placeholder(tokens.device))

    def _enter(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        segments: Segments | None = kwargs.get("segments")
        if segments is None:
            self.current = None
            return None
        config: Any = decoder.config
        if config._attn_implementation != self.attention:
            raise InputError(
                f"attention was set to {config._attn_implementation} after apply, which would let documents see each "
                f"other; apply again, or restore(model) and train without segments"
            )
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        if tokens is None or tuple(tokens.shape[:2]) != (1, segments.total):
            shape = None if tokens is None else list(tokens.shape)
            raise InputError(
                f"segments hold {segments.total:,} tokens, but the batch has shape {shape}; "
                f"it must be [1, {segments.total}]"
            )
        self.current = segments = segments.on(tokens.device)
        mask = self._mask(decoder, segments)
        kwargs = dict(kwargs, segments=Boundaries(segments), use_cache=False, attention_mask=mask)
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = segments.position_ids()
        return args, kwargs

    def _mask(self, decoder: Any, segments: Segments) -> torch.Tensor:
        """The dense mask where it is the carrier, in the dtype that attention will compute in; else a placeholder."""
        if self.carrier != "mask":
            return mask_placeholder(segments.device)
        segments.readers.add(id(decoder))  # which hands the mask on, as was found out in apply
        kind = segments.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else decoder.dtype
        return segments.mask(dtype)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        segments: Segments | Boundaries | None = kwargs.get("segments")
        if segments is None:
            return
        if isinstance(segments, Boundaries):  # the decoder's own hook sees what the first one put in
            segments = segments.segments
        self.current = None  # a batch's segments die with it
        if self.checked or self.carrier == "mask":
            return
        decoder = self.decoder
        expected = attention_modules(decoder)
        reading = {id(m) for m in decoder.modules()} & segments.readers
        deaf = [name for key, name in expected.items() if key not in reading]
        layers = getattr(decoder.config, "num_hidden_layers", len(expected))
        if deaf or len(reading) < layers:
            raise InputError(
                f"{type(decoder).__name__} does not hand segments to its attention ({len(reading)} of "
                f"{max(len(expected), layers)} modules read them; not {', '.join(deaf[:3]) or 'all layers'}): "
                f"documents would see each other; set packing.enabled: false"
            )
        self.checked = True


def _is_placeholder(mask: Any) -> bool:
    """Whether a mask, or each of several by kind of layer, says nothing."""
    each = list(mask.values()) if isinstance(mask, dict) else [mask]
    return all(isinstance(one, torch.Tensor) and one.numel() == 1 for one in each)


def _shape(mask: Any) -> object:
    """A mask's shape, or the shapes of several by kind of layer, for a message."""
    if isinstance(mask, dict):
        return {kind: _shape(one) for kind, one in mask.items()}
    return list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
