"""Base weights in four bits (NF4) through bitsandbytes: checked early, loaded, counted, and turned back.

The frozen base is held in blocks of 64 four-bit codes with eight-bit scales (double quantisation), 0.516 bytes a weight
instead of 2, and made into the compute dtype again for each product, once in the forward, once in the backward and once
in a recompute. bitsandbytes registers product and reverse as operators on the current stream, without a question to
the device, so that they go through compilation and capture as they are. What stays as it was loaded: the output head,
embeddings, norms, and experts that are fused into one tensor (bitsandbytes only knows linear layers).

The trade-off is arithmetic for memory: about 7% of a step at 14 billion parameters. The alternative, eight-bit
weights, costs twice the memory and has no double quantisation.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from slipstream.decision import Decision
from slipstream.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import BitsAndBytesConfig, PreTrainedModel

Quantize = Literal["none", "nf4"]
"""What the base weights are held in: as ``load.dtype`` says, or in four bits."""
INSTALL = "pip install 'slipstream[nf4]'"


def check_quantize(quantize: Quantize, *, has_card: bool) -> None:
    """Raises ``InputError`` where a run can't train in four bits: no card, or bitsandbytes is missing."""
    check_card(quantize, has_card=has_card)
    if quantize != "none":
        check_installed()


def check_card(quantize: Quantize, *, has_card: bool) -> None:
    """Raises ``InputError`` where the device can't hold four-bit weights."""
    if quantize != "none" and not has_card:
        raise InputError(
            "load.quantize: nf4 needs a CUDA card, and there is none here; set load.quantize: none, with a smaller "
            "model if memory is short (slipstream doctor says why no card is seen)"
        )


def check_installed() -> None:
    """Raises ``InputError`` where bitsandbytes is missing."""
    if find_spec("bitsandbytes") is None:
        raise InputError(f"load.quantize: nf4 needs bitsandbytes, which is not installed; {INSTALL}, or set it to none")


def nf4_config(dtype: "torch.dtype") -> "BitsAndBytesConfig":
    """transformers' configuration for NF4 with double quantisation, products in ``dtype``. Raises ``InputError``."""
    from transformers import BitsAndBytesConfig

    check_installed()
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def is_four_bit(parameter: "torch.Tensor") -> bool:
    """Whether a parameter holds packed four-bit codes."""
    return getattr(parameter, "quant_state", None) is not None


def parameter_count(parameter: "torch.Tensor") -> int:
    """Numbers that a parameter stands for: four-bit codes lie two (or more) in an element."""
    if not is_four_bit(parameter):
        return parameter.numel()
    state: Any = parameter.quant_state  # type: ignore[attr-defined]
    return int(state.shape.numel())


def quantised_modules(model: "nn.Module") -> "dict[str, nn.Module]":
    """The modules with four-bit weights, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if "weight" in module._parameters and is_four_bit(module.weight)
    }


def keep_trainable(model: "nn.Module") -> None:
    """Keep bitsandbytes from repacking weights for a CPU's bf16 units at the first inference, which ends gradients."""
    for module in quantised_modules(model).values():
        module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def quantize_decisions(model: "nn.Module") -> list[Decision]:
    """What became of ``load.quantize: nf4`` (empty where nothing is quantised): the share in four bits."""
    four_bit = {id(module.weight) for module in quantised_modules(model).values()}
    if not four_bit:
        return []
    parameters = list(model.parameters())
    total = sum(parameter_count(parameter) for parameter in parameters)
    inside = sum(parameter_count(parameter) for parameter in parameters if id(parameter) in four_bit)
    reason = (
        f"{inside / total:.0%} of {total:,} parameters are held in four bits; embeddings, output head, norms and "
        f"experts that are one tensor keep their dtype"
    )
    return [Decision("nf4", True, reason)]


def dequantise(model: "PreTrainedModel", dtype: "torch.dtype") -> "PreTrainedModel":
    """The model on the CPU with plain weights in place of its four-bit codes; ``dtype``: the model's own, or float32.

    Each weight is first made in the dtype that training multiplied it in, so that the values are those that an adapter
    was trained beside. One layer at a time: the card never holds the plain model.
    """
    import torch

    for name, module in quantised_modules(model).items():
        plain = _plain_weight(module).to("cpu", dtype)
        bias = module.bias
        linear = torch.nn.Linear(plain.shape[1], plain.shape[0], bias=bias is not None, device="meta")
        linear.weight = torch.nn.Parameter(plain, requires_grad=False)
        linear.bias = bias  # type: ignore[assignment]
        model.set_submodule(name, linear)
    _forget_quantisation(model)
    model.to("cpu")
    return model.float() if dtype == torch.float32 else model


def _plain_weight(module: "nn.Module") -> "torch.Tensor":
    """[out, in] in the module's compute dtype."""
    import torch
    from bitsandbytes.functional import dequantize_4bit

    weight: Any = module.weight
    with torch.no_grad():
        plain: torch.Tensor = dequantize_4bit(weight.data, weight.quant_state)
    compute: torch.dtype | None = module.compute_dtype  # type: ignore[assignment]
    return plain if compute is None else plain.to(compute)


def _forget_quantisation(model: Any) -> None:
    """Have model and configuration say that the weights are plain, so that they are saved and loaded as such."""
    model.hf_quantizer.remove_quantization_config(model)
    model.is_loaded_in_4bit = False
    vars(model).pop("_weight_conversions", None)  # older transformers would read codes backwards as it saves
