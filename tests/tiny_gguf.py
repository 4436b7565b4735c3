"""A GGUF file small enough to make in code."""

from pathlib import Path

import gguf
import numpy as np

from tiny import CHATML, tiny_tokenizer

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
VOCABULARY = 320


def write_gguf(path: Path, *, leave_out: str = "") -> Path:
    """A llama with random weights, its matrices in 8 bits, and a byte-level tokenizer with a chat template."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCABULARY)
    add_tokenizer(writer)
    random = np.random.default_rng(0)
    for name, shape in tensor_shapes().items():
        values = random.normal(scale=0.1, size=shape).astype(np.float32)
        if name == leave_out:
            continue
        if len(shape) == 1:
            writer.add_tensor(name, 1 + values)
        else:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    filler = [f"<|unused{i}|>" for i in range(VOCABULARY - len(tokens))]
    special = set(tokenizer.added_tokens_decoder)
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, *filler])
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * len(filler)])
    writer.add_token_merges(["Ċ Ċ", "t h", "th e", "Ġ the", "Ġ a", ": Ġ"])
    writer.add_bos_token_id(tokenizer.convert_tokens_to_ids("<|im_start|>"))
    writer.add_eos_token_id(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    writer.add_unk_token_id(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    writer.add_chat_template(CHATML)


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    key_value = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (key_value, HIDDEN),
            f"blk.{layer}.attn_v.weight": (key_value, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, INTERMEDIATE),
        }
    return shapes
