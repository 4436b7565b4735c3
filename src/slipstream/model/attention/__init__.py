"""Attention that reads ``Segments``: each document of a packed row attends to itself alone.

One file a choice (``varlen``, ``flex``, ``xformers``, ``sdpa``), each with what stands in its way and its kernel;
``choice`` picks among them, ``registry`` joins them to transformers.
"""

from slipstream.model.attention.call import Needs
from slipstream.model.attention.choice import KERNELS, WHAT, AttentionChoice, choose_attention
from slipstream.model.attention.registry import attention_key, mask_placeholder, register_attention

__all__ = [
    "KERNELS",
    "WHAT",
    "AttentionChoice",
    "Needs",
    "attention_key",
    "choose_attention",
    "mask_placeholder",
    "register_attention",
]
