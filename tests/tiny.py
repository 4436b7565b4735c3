"""Models and tokenizers small enough to make in code: the tests need no network and no weights.

The tokenizer is byte-level (any text encodes, one token a byte), with a few merges, so that a token may reach over the
border of two stretches of text, and the special tokens of the templates in use.
"""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|start|>",
    "<|end|>",
    "<|return|>",
)
_MERGES = [("Ċ", "Ċ"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "a"), (":", "Ġ")]


def tiny_tokenizer(
    chat_template: str | None = CHATML, *, eos: str = "<|im_end|>", bos: str | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 275 tokens; with ``bos``, it begins a text with that token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, *("".join(pair) for pair in _MERGES)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=chat_template,
        eos_token=eos,
        pad_token="<|endoftext|>",
        **({"bos_token": bos} if bos is not None else {}),
    )


def tiny_model(kind: str = "llama", **overrides: Any) -> PreTrainedModel:
    """A random float32 model: hidden size 32, two layers, two heads; ``kind`` is transformers' model type."""
    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(kind, **{**settings, **overrides})
    return AutoModelForCausalLM.from_config(config).float()
