"""Whether a checkpoint gave a model all its weights, by what transformers tells of loading it.

transformers fills weights that are missing with random numbers and a warning, and raises for those of another shape
without naming one. Both are the user's to mend, so both are asked for and told with their names and sizes. The
alternative, reading the weight files' headers first, would have to know how each family renames its weights.
"""

from collections.abc import Sequence

from slipstream.errors import InputError

Mismatch = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A weight's name, its shape in the checkpoint, and the one that the model has for it."""


def check_whole(name: str, missing: Sequence[str], other_shapes: Sequence[Mismatch]) -> None:
    """Raises ``InputError`` for weights that the checkpoint ``name`` lacks, or holds in another shape."""
    if other_shapes:
        weight, stored, wanted = other_shapes[0]
        more = f" (and so on, {len(other_shapes)} weights in all)" if len(other_shapes) > 1 else ""
        raise InputError(
            f"model: the checkpoint {name} holds {weight} as {_sides(stored)}, and its config.json makes it "
            f"{_sides(wanted)}{more}; mend config.json (vocab_size is the rows of the embedding), or use the weights "
            "that belong to it"
        )
    if missing:
        raise InputError(
            f"model: the checkpoint {name} lacks {len(missing)} of the model's weights, e.g. {missing[0]}; "
            "use a checkpoint of the whole causal language model"
        )


def _sides(shape: Sequence[int]) -> str:
    return " × ".join(f"{side:,}" for side in shape)
