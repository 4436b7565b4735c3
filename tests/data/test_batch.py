"""Documents end to end: every token, label and position where it belongs, and nothing lost."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import InputError
from slipstream.data.batch import IGNORE, collate


def test_the_picture_in_the_docstring() -> None:
    documents = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6, 7, 8, 9]}]
    batch = collate(documents, 12)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0]]
    assert batch.labels.tolist() == [[-100, 2, 3, -100, 5, -100, 7, 8, 9, -100, -100, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 0, 0]]
    assert batch.lengths == (3, 2, 4)
    assert {t.dtype for t in (batch.input_ids, batch.labels, batch.position_ids)} == {torch.int64}


def test_a_packed_row_is_its_documents() -> None:
    row = {"input_ids": [1, 2, 3, 4, 5], "labels": [1, -100, 3, 4, 5], "seq_lengths": [3, 2]}
    documents = [{"input_ids": [1, 2, 3], "labels": [1, -100, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    packed, single = collate([row, {"input_ids": [6]}], 8), collate([*documents, {"input_ids": [6]}], 8)
    assert packed.lengths == single.lengths == (3, 2, 1)
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(getattr(packed, name), getattr(single, name))
    assert packed.labels.tolist() == [[-100, -100, 3, -100, 5, -100, -100, -100]]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(1, 50_000), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(0, 5))
def test_nothing_is_lost_or_moved(documents: list[list[int]], padding: int) -> None:
    used = sum(map(len, documents))
    batch = collate([{"input_ids": ids} for ids in documents], used + padding)
    assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape == (1, used + padding)
    at = 0
    for ids, length in zip(documents, batch.lengths, strict=True):
        assert batch.input_ids[0, at : at + length].tolist() == ids
        assert batch.labels[0, at : at + length].tolist() == [IGNORE, *ids[1:]]
        assert batch.position_ids[0, at : at + length].tolist() == list(range(length))
        at += length
    assert (batch.labels[0, at:] == IGNORE).all()


def test_examples_are_not_changed() -> None:
    ids, labels = np.array([1, 2, 3]), torch.tensor([1, 2, 3])
    batch = collate([{"input_ids": ids, "labels": labels}], 3)
    assert batch.labels.tolist() == [[-100, 2, 3]]
    assert ids.tolist() == labels.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "a batch of no examples"),
        ([{"input_ids": []}], r"input_ids of shape \[0\]"),
        ([{"input_ids": [[1, 2]]}], r"input_ids of shape \[1, 2\]"),
        ([{"input_ids": [1] * 9}], "9 tokens in 1 examples > 8 tokens a batch; raise the collator's tokens"),
        ([{"input_ids": [1] * 4}, {"input_ids": [1] * 5}], "9 tokens in 2 examples > 8 tokens"),
        ([{"input_ids": [1, 2], "labels": [1]}], "1 labels for 2 input_ids"),
        ([{"input_ids": [1, 2, 3], "seq_lengths": [2]}], r"seq_lengths \[2\] sum to 2, but the row has 3 tokens"),
        ([{"input_ids": [1, 2, 3], "seq_lengths": [2, 2]}], "sum to 4"),
        ([{"input_ids": [1, 2, 3], "seq_lengths": [3, 0]}], "every length must be at least 1"),
        ([{"input_ids": [1, 2, 3], "seq_lengths": [4, -1]}], "every length must be at least 1"),
        ([{"input_ids": [1, 2, 3], "seq_lengths": []}], "sum to 0"),
        ([{"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}], "start again at token 2 .*remove_unused_columns=False"),
        ([{"input_ids": [1, 2, 3], "position_ids": [4, 0, 1]}], "start again at token 1 .*lost its boundaries"),
    ],
)
def test_bad_examples_are_refused(examples: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        collate(examples, 8)


def test_positions_say_nothing_where_lengths_do() -> None:
    row = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
    alone = collate([row], 4)
    for positions in ([0, 1, 2], [7, 8, 9]):
        found = collate([{**row, "position_ids": positions}], 4)
        assert found.lengths == (3,)
        assert torch.equal(found.position_ids, alone.position_ids)
    for positions in ([0, 1, 0], [0, 1, 2]):
        found = collate([{**row, "seq_lengths": [2, 1], "position_ids": positions}], 4)
        assert found.lengths == (2, 1)
        assert found.position_ids.tolist()[0][:3] == [0, 1, 0]
