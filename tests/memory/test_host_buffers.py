"""The host pool: exact sizes, reuse by kind, a budget, pinning that may fail, and buffers that a graph names."""

import errno
import gc
import mmap
from typing import Any

import pytest
import torch

from late import LateMark, LateTransfers
from slipstream.decision import Decision
from slipstream.memory import host_buffers
from slipstream.memory.host_buffers import BufferKey, HostBuffer, HostPool, page_aligned

DEVICE = torch.device("cuda", 0)


def key(nbytes: int, dtype: torch.dtype = torch.bfloat16, device: torch.device = DEVICE) -> BufferKey:
    return BufferKey(device, dtype, nbytes)


def pool_of(budget: int) -> tuple[HostPool, LateTransfers, list[Decision]]:
    notes: list[Decision] = []
    return HostPool(budget, notes.append), LateTransfers(), notes


def test_exact_bytes_in_pages_of_their_own() -> None:
    memory = page_aligned(5_000_001)
    assert memory.numel() == 5_000_001  # PyTorch's pinned allocator would take 8,388,608
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert not memory.any()
    memory.fill_(7)
    assert int(memory.sum()) == 7 * 5_000_001


def test_buffers_are_reused_by_device_dtype_and_bytes() -> None:
    pool, transfers, _ = pool_of(10_000)
    first = pool.take(key(1000), transfers)
    assert first is not None
    assert first.flat().dtype == torch.bfloat16
    assert first.flat().numel() == 500
    pool.give(first)
    others = [key(1000, torch.float32), key(1000, device=torch.device("cuda", 1)), key(998)]
    assert all(pool.take(other, transfers) is not first for other in others)
    assert pool.take(key(1000), transfers) is first
    assert pool.held == 3998
    assert transfers.pinned[first.memory.data_ptr()] == 1000


def test_the_budget_holds_and_idle_buffers_of_other_kinds_make_room() -> None:
    pool, transfers, _ = pool_of(2500)
    a, b = pool.take(key(1000), transfers), pool.take(key(1000), transfers)
    assert pool.take(key(1000), transfers) is None
    assert a is not None
    assert b is not None
    pool.give(a)
    late = LateMark(lambda: None, ())
    b.busy.append(late)
    larger = pool.take(key(1500), transfers)
    assert larger is not None  # a had to go
    assert pool.held == 2500
    assert len(transfers.pinned) == 2
    pool.give(b)
    assert pool.take(key(1001), transfers) is None  # b alone would not be enough
    assert late.done  # it went all the same, after the copy that still used it
    assert pool.held == 1500


def test_pinning_that_fails_is_told_once_and_pageable_memory_taken() -> None:
    pool, transfers, notes = pool_of(10_000)
    pinned = pool.take(key(1000), transfers)
    transfers.pinnable = False
    pageable = [pool.take(key(1000), transfers) for _ in range(3)]
    assert [decision.on for decision in notes] == [False]
    assert "1,000 bytes of host memory" in notes[0].reason
    assert "memory.host_limit" in notes[0].reason
    assert pinned is not None
    assert pinned.pinned
    assert not any(buffer is None or buffer.pinned for buffer in pageable)
    for buffer in (pinned, *pageable):
        assert buffer is not None
        pool.give(buffer)
    pool.close()
    assert pool.held == 0
    assert not transfers.pinned


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("out of memory")])
def test_memory_that_the_system_refuses_ends_the_budget(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise error

    pool, transfers, notes = pool_of(10_000)
    first = taken(pool, transfers)
    with monkeypatch.context() as patched:
        if isinstance(error, OSError):
            patched.setattr(host_buffers, "page_aligned", refuse)
        else:
            patched.setattr(transfers, "pin", refuse)
        assert pool.take(key(1000), transfers) is None
    assert str(error) in pool.refused
    assert (pool.held, pool.budget, notes) == (1000, 1000, [])
    pool.give(first)
    assert pool.take(key(1000), transfers) is first  # what was given before is as good as ever
    pool.give(first)
    pool.close()
    assert pool.held == 0


def test_close_gives_back_what_is_idle_and_later_what_was_in_use() -> None:
    pool, transfers, _ = pool_of(10_000)
    idle, used = pool.take(key(1000), transfers), pool.take(key(2000), transfers)
    assert idle is not None
    assert used is not None
    pool.give(idle)
    pool.close()
    assert pool.held == 2000
    mark = LateMark(lambda: None, ())
    used.busy.append(mark)
    pool.give(used)
    assert mark.done
    assert pool.held == 0
    assert not transfers.pinned


def test_buffers_of_graphs_are_lent_to_graphs_only_until_they_are_released() -> None:
    pool, transfers, _ = pool_of(10_000)
    warm = [taken(pool, transfers) for _ in range(2)]
    for buffer in warm:
        pool.give(buffer)
    transfers.graph = True
    first, second = taken(pool, transfers), taken(pool, transfers)
    assert {first, second} == set(warm)
    with pytest.raises(RuntimeError, match="no idle host buffer of 1,000 bytes while a CUDA graph is captured"):
        taken(pool, transfers)
    mark = LateMark(lambda: None, ())
    first.busy.append(mark)
    pool.give(first)
    assert taken(pool, transfers) is first  # the same graph may use it twice
    assert first.busy == [mark]  # in order
    pool.give(first)
    pool.give(second)
    transfers.graph = False
    eager = taken(pool, transfers)
    assert eager not in warm
    assert pool.held == 3000
    transfers.graph = True
    assert {taken(pool, transfers), taken(pool, transfers)} == set(warm)  # the next graph shares them
    assert first.busy == []  # the first graph's events mean nothing in it
    pool.give(first)
    pool.give(second)
    transfers.graph = False
    pool.release_graphs()
    assert transfers.log == ["finish"]
    assert taken(pool, transfers) in warm


def test_a_pool_at_rest_holds_what_is_in_use_and_what_graphs_name_until_they_are_given_up() -> None:
    pool, transfers, _ = pool_of(10_000)
    idle, used, graphs = (taken(pool, transfers) for _ in range(3))
    pool.give(graphs)
    transfers.graph = True
    assert taken(pool, transfers) is graphs
    transfers.graph = False
    pool.give(idle)
    pool.give(graphs)
    pool.rest()
    assert pool.held == 2000
    mark = LateMark(lambda: None, ())
    used.busy.append(mark)
    pool.give(used)  # at once, since nobody takes any more
    assert mark.done
    assert pool.held == 1000
    assert list(transfers.pinned) == [graphs.memory.data_ptr()]  # where replays still write
    pool.release_graphs()
    assert pool.held == 0
    assert not transfers.pinned
    again = taken(pool, transfers)
    pool.give(again)
    assert pool.held == pool.idle == 1000  # a step ends the rest


def test_close_takes_what_graphs_name() -> None:
    pool, transfers, _ = pool_of(10_000)
    buffer = taken(pool, transfers)
    pool.give(buffer)
    transfers.graph = True
    pool.give(taken(pool, transfers))
    transfers.graph = False
    pool.close()
    assert transfers.log == ["finish"]
    assert pool.held == 0
    assert not transfers.pinned


def taken(pool: HostPool, transfers: LateTransfers) -> HostBuffer:
    buffer = pool.take(key(1000), transfers)
    assert buffer is not None
    return buffer


def test_a_pool_that_is_dropped_unclosed_unlocks_its_pages() -> None:
    """Pages that stay registered can't be registered again once the system gives them to somebody else."""
    transfers = LateTransfers()
    unlocked: list[int] = []
    transfers.unpin = lambda memory: unlocked.append(memory.numel())
    pool = HostPool(10_000, lambda decision: None)
    kept = pool.take(BufferKey(torch.device("cpu"), torch.float32, 4096), transfers)
    assert kept is not None
    assert kept.pinned
    pool.give(kept)
    del kept, pool
    gc.collect()
    assert unlocked == [4096]
