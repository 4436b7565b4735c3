"""Host memory that offloaded activations may take: never more than is free, and shared by a machine's processes."""

import pytest

from slipstream.memory import host_budget as module
from slipstream.memory.host_budget import HostBudget, budget_of, host_budget

GIB = 2**30


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def gib(limit: float | None, free: float | None = 100) -> float:
    return budget_of(limit, None if free is None else free * GIB).nbytes / GIB


def test_a_limit_holds_up_to_what_is_free() -> None:
    assert gib(None) == 80
    assert gib(20.0) == 20
    assert gib(90.0) == 90  # the user's word
    assert gib(1000.0) == 100  # but not beyond what is there
    assert gib(1000.0, None) == 1000  # of a machine that nobody has looked at
    assert gib(None, None) > 2**20


def test_processes_of_a_machine_share_a_limit_and_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert gib(None) == 20
    assert gib(120.0, 50) == 12.5
    assert gib(40.0) == 10
    assert "in equal parts for 4 processes" in budget_of(40.0, 100 * GIB).why


def test_what_is_free_is_what_the_machine_and_its_container_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_host_memory", lambda: 50 * GIB)
    assert host_budget(1000.0) == HostBudget(50 * GIB, 1000 * GIB, 50 * GIB)
    assert host_budget(None).nbytes == 40 * GIB


@pytest.mark.parametrize(
    ("limit", "free", "told"),
    [
        (None, 20.0, "may take 16.0 GiB (80% of the 20.0 GiB that are free); set memory.host_limit to 17.5, lower"),
        (None, 10.0, "may take 8.0 GiB (80% of the 10.0 GiB that are free); free 7.5 GiB more of host memory and set "),
        (8.0, 100.0, "may take 8.0 GiB (memory.host_limit); raise memory.host_limit to 17.5, lower"),
        (30.0, 16.0, "memory.host_limit is 30.0 GiB, but only 16.0 GiB of host memory is free); free 1.5 GiB more of"),
        (8.0, 16.0, "may take 8.0 GiB (memory.host_limit); free 1.5 GiB more of host memory and raise memory.host_li"),
        (8.0, None, "may take 8.0 GiB (memory.host_limit); raise memory.host_limit to 17.5, lower"),
    ],
)
def test_a_shortage_is_told_with_what_would_end_it(limit: float | None, free: float | None, told: str) -> None:
    budget = budget_of(limit, None if free is None else free * GIB)
    said = budget.shortage(35, GIB // 2)
    assert said.startswith("activations: offload needs 17.5 GiB of host memory (35 layer inputs of 512.0 MiB) and may")
    assert told in said
    recompute = "set memory.activations: recompute"
    assert said.endswith(recompute if limit is None else f"{recompute} and memory.host_limit: null")


@pytest.mark.parametrize("free", [100.0, 17.5, 16.0, 1.0])
@pytest.mark.parametrize("limit", [None, 2.0, 17.0, 30.0])
@pytest.mark.parametrize("processes", [1, 3])
def test_what_a_shortage_advises_ends_it(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, free: float, processes: int
) -> None:
    """Whoever frees as much as is said, and sets the limit that is said, has enough."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    needed = 35 * GIB // 2 // processes
    if budget_of(limit, free * GIB).nbytes >= needed:
        return
    words = budget_of(limit, free * GIB).room_for(needed).split()
    more = float(words[words.index("free") + 1]) + 0.05 if "free" in words else 0.0
    raised = float(words[-1]) if "to" in words else limit
    assert budget_of(raised, (free + more) * GIB).nbytes >= needed
