"""Chunks spread over processes: in order, few ahead, and what goes wrong in one is told."""

import os
from collections.abc import Iterator

import pytest

from chunk_work import squared
from slipstream.data.workers import AHEAD, in_order
from slipstream.errors import InputError


def numbers(count: int, read: list[int], start: int = 20) -> Iterator[int]:
    for number in range(start, start + count):
        read.append(number)
        yield number


def test_results_come_in_order_and_few_chunks_are_ahead() -> None:
    read: list[int] = []
    taken, processes, most = 0, set(), 0
    for number, (square, process) in enumerate(in_order(squared, numbers(60, read), processes=2, alone=3), start=20):
        assert square == number * number
        processes.add(process)
        taken += 1
        most = max(most, len(read) - taken)
    assert taken == 60
    assert most == 2 * AHEAD - 1
    assert os.getpid() in processes, "the first ones are made here"
    assert len(processes) == 3


def test_a_few_chunks_start_no_process() -> None:
    assert {process for _, process in in_order(squared, numbers(3, []), processes=2, alone=3)} == {os.getpid()}
    assert {process for _, process in in_order(squared, numbers(5, []), processes=1, alone=3)} == {os.getpid()}


@pytest.mark.parametrize(
    ("start", "message"), [(10, "13 is no number for a chunk"), (15, "a process that tokenises was killed")]
)
def test_what_goes_wrong_in_a_process_is_told(start: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(in_order(squared, numbers(30, [], start), processes=2, alone=1))
