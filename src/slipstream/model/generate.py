"""Text from a model, one prompt at a time: to see what a tuned model says, not to serve it.

transformers' ``generate`` does the work. Added is when to stop: many chat models end a turn with a token that is not
their end-of-text token, and a checkpoint's generation config does not always name it, so it is read off the chat
template. The alternative, trusting the config, lets such a model talk on and answer itself.
"""

from typing import TYPE_CHECKING

from slipstream.errors import InputError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

ANSWER = "an answer"
"""What the assistant says in the conversation that shows how the template ends a turn."""


def generate_text(
    model: "nn.Module",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    *,
    system: str | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """The model's answer: through the chat template where the tokenizer has one, else the continuation of the text.

    ``temperature`` 0 takes the likeliest token each time; above it, samples, the same for the same seed. Raises
    ``InputError`` for a prompt that leaves no room in the model's context, and for ``system`` without a template.
    """
    import torch

    input_ids = torch.tensor([_prompt_ids(tokenizer, prompt, system)], device=next(model.parameters()).device)
    length = input_ids.shape[1]
    room = _room(model, length, max_tokens)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            output = model.generate(  # type: ignore[operator]
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=room,
                eos_token_id=sorted(stop_ids(model, tokenizer)) or None,
                pad_token_id=_pad_id(tokenizer),
                **sampling,
            )
    finally:
        model.train(training)
    text: str = tokenizer.decode(output[0, length:], skip_special_tokens=True)
    return text.strip()


def stop_ids(model: "nn.Module", tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """The tokens that end an answer: those the generation config and the tokenizer name, and the template's."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = set(named if isinstance(named, list) else [named])
    ids |= {tokenizer.eos_token_id, _end_of_turn(tokenizer)}
    return {token for token in ids if token is not None}


def _end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The special token that the chat template writes after the assistant's words, if there is one."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": ANSWER}]
    rendered: str = tokenizer.apply_chat_template(turns, tokenize=False)
    rest = tokenizer.encode(rendered.rpartition(ANSWER)[2].lstrip(), add_special_tokens=False)
    special = set(tokenizer.all_special_ids) | {
        token for token, added in tokenizer.added_tokens_decoder.items() if added.special
    }
    return rest[0] if rest and rest[0] in special else None


def _prompt_ids(tokenizer: "PreTrainedTokenizerBase", prompt: str, system: str | None) -> list[int]:
    if not tokenizer.chat_template:
        if system is not None:
            raise InputError("system: the tokenizer has no chat template to put it in; write it into the prompt")
        plain: list[int] = tokenizer.encode(prompt)
        return plain
    turns = [{"role": "user", "content": prompt}]
    if system is not None:
        turns.insert(0, {"role": "system", "content": system})
    text: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _room(model: "nn.Module", length: int, max_tokens: int) -> int:
    """How many tokens may be made: what was asked for, or what the context leaves."""
    context: int | None = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if context is None:
        return max_tokens
    if length >= context:
        raise InputError(f"prompt: {length:,} tokens, and the model's context has {context:,}; give a shorter one")
    return min(max_tokens, context - length)


def _pad_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Any token will do, since one prompt is never padded; ``generate`` warns without one."""
    known = [token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None]
    return int(known[0]) if known else 0
