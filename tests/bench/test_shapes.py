import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.bench.shapes import SHAPES, SHORTEST, adapted_model, random_documents, shape_config
from slipstream.errors import InputError


@settings(deadline=None)
@given(st.integers(64, 5000), st.integers(0, 5))
def test_documents_fill_the_row(tokens: int, seed: int) -> None:
    lengths = [len(one["input_ids"]) for one in random_documents(tokens, 100, seed)]
    assert sum(lengths) == tokens
    assert len(lengths) >= 2
    assert min(lengths) >= SHORTEST


def test_mean_length_is_about_250() -> None:
    lengths = [len(one["input_ids"]) for one in random_documents(400_000, 100)]
    assert 225 < sum(lengths) / len(lengths) < 275


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_configuration(name: str) -> None:
    config = shape_config(name)
    assert config.num_hidden_layers == SHAPES[name]["num_hidden_layers"]
    assert shape_config(name, 2).num_hidden_layers == 2
    assert config.num_attention_heads % config.num_key_value_heads == 0


def test_the_published_depths() -> None:
    assert (SHAPES["llama-3.2-1b"]["num_hidden_layers"], SHAPES["qwen3-0.6b"]["num_hidden_layers"]) == (16, 28)


def test_same_model_at_every_call() -> None:
    torch.manual_seed(5)
    first = adapted_model(shape_config("tiny", 2), torch.device("cpu"))
    torch.manual_seed(6)
    second = adapted_model(shape_config("tiny", 2), torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    trained = [name for name, p in first.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


def test_unknown_shape() -> None:
    with pytest.raises(InputError, match=r"'lama-3.2-1b' is unknown; did you mean llama-3.2-1b"):
        shape_config("lama-3.2-1b")
