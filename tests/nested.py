"""A language model inside a multimodal one, whose configuration nests one for each part."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3Config

from packed import WINDOW


def nested_model(num_hidden_layers: int = 2, **text: Any) -> Any:
    """Gemma 3 with a vision part, the same whenever it is asked for; an even number of layers.

    ``text``: settings of its language model.
    """
    torch.manual_seed(0)
    settings = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "num_hidden_layers": num_hidden_layers,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * (num_hidden_layers // 2),
        **text,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=settings, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    return AutoModelForCausalLM.from_config(config).float().train()
