"""Whether a model can be made of the sizes in a configuration: every fault of them in one message, before any is used.

transformers checks types and a few relations; a negative width ends in a traceback of torch, and a width of zero, more
experts a token than there are, or a window that reaches forward go through and give a model that learns nothing. So
each size is held against what it may be, under all the names that families have for it. The price is a table of limits;
the alternative, trying to build the model and wording what torch says, would let the silent ones pass.

The file's own values are checked before transformers makes a configuration of them (which divides by some, and makes
lists as long as others), and the configuration after, with its defaults.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.cost.shape import NAMES
from slipstream.errors import InputError

MOST: Mapping[str, int] = {
    **dict.fromkeys(NAMES["hidden"], 2**20),
    **dict.fromkeys(NAMES["layers"], 2**12),
    **dict.fromkeys((*NAMES["heads"], *NAMES["key_heads"]), 2**14),
    **dict.fromkeys((*NAMES["inner"], "moe_intermediate_size"), 2**22),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"), 2**16),
    "vocab_size": 2**26,
}
"""The most that each size may be, far above every model there is; a weight's elements still count in 64 bits. Each is
at least 1, or null where the family has a default.
"""
MOST_EXPERTS = 2**14
DENSE_WITHOUT = frozenset(
    {"bamba", "flint", "granitemoehybrid", "jamba", "qwen2_moe", "qwen3_moe", "qwen3_next"}
    | {"qwen3_omni_moe_text", "qwen3_omni_moe_talker_text", "qwen3_vl_moe_text"}
)
"""Families that build a dense model of no experts, or of one."""


def check_sizes(values: Mapping[str, Any], name: str) -> None:
    """Raises ``InputError`` with all sizes in a text model's ``values`` of which no model can be made.

    ``name``: whose configuration it is. Values that are no whole numbers are left to others: lists hold a size for
    each layer, and types are transformers' own check.
    """
    faults = [*_width_faults(values), *_head_faults(values), *_expert_faults(values), *_window_faults(values)]
    if faults:
        raise InputError(f"model: the config of {name} has {'; '.join(faults)}; mend its config.json")


def text_values(config: Any) -> Mapping[str, Any]:
    """The values of a ``config.json``'s mapping or a configuration's object that concern the text model."""
    if isinstance(config, Mapping):
        inner = config.get("text_config")
        return {**config, **inner} if isinstance(inner, Mapping) else config
    text = config.get_text_config(decoder=True)
    values = text.to_dict()
    renamed = {key: values.get(own) for key, own in text.attribute_map.items() if own not in MOST}
    return {**values, **renamed}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _width_faults(values: Mapping[str, Any]) -> Iterator[str]:
    for key, most in MOST.items():
        value = _whole(values.get(key))
        if value is not None and not 1 <= value <= most:
            yield f"{key} {_against(value, most)}"


def _against(value: int, most: int) -> str:
    """E.g. ``-5 < 1``; ``10,000,000 > 65,536, the most that is reckoned with``."""
    return f"{value:,} < 1" if value < 1 else f"{value:,} > {most:,}, the most that is reckoned with"


def _head_faults(values: Mapping[str, Any]) -> Iterator[str]:
    heads, shared = _whole(values.get("num_attention_heads")), _whole(values.get("num_key_value_heads"))
    if heads and shared and heads > 0 and shared > 0 and heads % shared:
        yield f"{heads:,} attention heads, not a multiple of its {shared:,} key and value heads"
    hidden = next((size for key in NAMES["hidden"] if (size := _whole(values.get(key)))), 0)
    among = next((size for key in NAMES["heads"] if (size := _whole(values.get(key)))), 0)
    width = _whole(values.get("head_dim")) or (hidden // among if among > 0 else 0)
    turned = _whole(values.get("rotary_dim"))
    if turned is not None and 0 < width < turned:
        yield f"rotary_dim {turned:,} > {width:,}, the width of a head"


def _expert_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Of the number of experts, and of those that a token goes to."""
    key = next((key for key in NAMES["experts"] if values.get(key) is not None), "")
    count, chosen = _whole(values.get(key)), _whole(values.get("num_experts_per_tok"))
    if count is None or (count in (0, 1) and values.get("model_type") in DENSE_WITHOUT) or (count == 0 and not chosen):
        return
    if not 1 <= count <= MOST_EXPERTS:
        yield f"{key} {_against(count, MOST_EXPERTS)}"
    if chosen is not None and chosen < 1:
        yield f"num_experts_per_tok {chosen:,} < 1"
    if chosen is not None and 1 <= count < chosen:
        yield f"num_experts_per_tok {chosen:,} > {key} {count:,}: a token can't go to more experts than there are"


def _window_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Of the tokens that attention reaches back, where any layer has such a window."""
    window, kinds = _whole(values.get("sliding_window")), values.get("layer_types")
    unused = values.get("use_sliding_window") is False or (kinds is not None and "sliding_attention" not in kinds)
    if window is not None and window < 1 and not unused:
        yield f"sliding_window {window:,} < 1 (null is no window)"
