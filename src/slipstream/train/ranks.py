"""The processes of one run, as a launcher starts them: who speaks, who goes first, what all must agree on.

The launcher (``torchrun``, ``accelerate launch``, a cluster's own) says how many processes there are and which one this
is, through the environment variables that they all set; what is done with them is the recipe's business. Everything
here runs over gloo on the host, beside the process group that gradients take, so that nothing in it touches a device or
waits for one. Trade-off: a second group of connections. Alternative: the gradients' group, where a flag of one rank
costs a kernel, and where waiting for a rank that still reads its data runs into the time-out of a hung kernel.

One rank must never decide by itself what all take part in (a save, an evaluation, the end): the others would wait for
it. Hence `Ranks.together` for errors, `Ranks.shared` for choices, and `Consensus` for wishes that come at any moment.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from platform import node
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slipstream.errors import InputError, ToldElsewhereError
from slipstream.train.launcher import check_alone
from slipstream.train.run_folder import RunFolder

T = TypeVar("T")
PATIENCE = timedelta(days=7)
"""How long ranks wait for one another on the host: one prepares data that all read. A dead rank is noticed at once."""


LAUNCHER = "start the processes with torchrun or accelerate launch, or unset WORLD_SIZE, RANK and LOCAL_RANK"
TOLD = 3
"""Differing values that are told."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run."""

    index: int = 0
    """Its number, from 0; the first one speaks and writes."""
    count: int = 1
    local_index: int = 0
    """Its number on its own machine, which is its device's number."""
    group: Any = None
    """The gloo group of all ranks; none where there is only one."""

    @classmethod
    @contextmanager
    def joined(cls) -> Iterator["Ranks"]:
        """The ranks that the launcher's environment speaks of, connected inside the context.

        A process group that exists already is used and left alone. Raises ``InputError`` where the environment can't
        be, or names more processes on this machine than it has devices.
        """
        count, index, local = _launched()
        if count == 1:
            yield cls()
            return
        ours = not dist.is_initialized()
        if ours:
            _connect(local)
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        yield cls(index, count, local, group)
        if ours:  # after an exception the process ends, and with it what it was connected to
            dist.barrier(group=group)
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.index == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """What goes wrong on one rank ends all of them.

        Waits for all ranks at the end. Where ``InputError`` was raised on any, the lowest of those ranks raises its
        own, and every other one ``ToldElsewhereError``.
        """
        if self.count == 1:
            yield
            return
        mine: InputError | None = None
        try:
            yield
        except InputError as error:
            mine = error
        told = self.gathered(None if mine is None else str(mine))
        failed = next((index for index, message in enumerate(told) if message is not None), None)
        if failed is None:
            return
        if failed == self.index and mine is not None:
            raise mine
        raise ToldElsewhereError(f"rank {failed}: {told[failed]}")

    def gathered(self, value: T) -> list[T]:
        """Every rank's ``value`` (small, pickled), by rank."""
        values: list[Any] = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def shared(self, work: Callable[[], T]) -> T:
        """What ``work`` gives on the first rank, on all of them; errors as in `together`."""
        result: list[Any] = [None]
        with self.together():
            if self.first:
                result = [work()]
        if self.count > 1:
            dist.broadcast_object_list(result, src=0, group=self.group)
        value: T = result[0]
        return value

    def in_turn(self, work: Callable[[], T]) -> T:
        """``work()`` of every rank: the first one's alone, then that of one on each other machine, then all others'.

        For what is made once and kept on disk: later ranks find it there.
        """
        turn = 0 if self.first else 1 if self.local_index == 0 else 2
        results: list[T] = []
        for now in range(3 if self.count > 1 else 1):
            with self.together():
                if now == turn:
                    results.append(work())
        return results[0]

    def agree(self, what: str, value: str, remedy: str) -> None:
        """Raises ``InputError`` where ``value`` is not the same on all ranks; compare digests, not data."""
        values = self.gathered(value)
        other = next((index for index, its in enumerate(values) if its != values[0]), None)
        with self.together():
            if self.first and other is not None:
                raise InputError(f"{what} differs between processes 0 and {other} of {self.count}; {remedy}")

    def agree_in(self, what: str, values: Mapping[str, str], remedy: str) -> None:
        """As `agree`, of several values by name: the first few that differ are told, as both ranks have them."""
        all_values = self.gathered(dict(values))
        other = next((index for index, its in enumerate(all_values) if its != all_values[0]), None)
        with self.together():
            if self.first and other is not None:
                told = _differences(all_values[0], all_values[other])
                raise InputError(f"{what} differs between processes 0 and {other} of {self.count}: {told}; {remedy}")

    def agree_on(self, folder: RunFolder) -> None:
        """Raises ``InputError`` where not all ranks see in ``folder`` what the first one writes there."""
        if self.count == 1:
            return
        with ExitStack() as held:
            token = self.shared(lambda: held.enter_context(folder.token()))
            looked = self.gathered((folder.holds(token), f"'{os.path.abspath(folder.path)}' on {node()}"))
        other = next((index for index, (seen, _) in enumerate(looked) if not seen), None)
        with self.together():
            if self.first and other is not None:
                raise InputError(
                    f"output '{folder.path}' is not one folder for all processes: what process 0 writes to "
                    f"{looked[0][1]} is not there for process {other} of {self.count}, which looks in "
                    f"{looked[other][1]}; set output to a folder on a disk that all machines share, by its absolute "
                    f"path, or start all processes in the same folder"
                )

    def any(self, wish: bool) -> bool:
        """Whether any rank has the wish; waits for all."""
        return any(self.gathered(wish))


class Consensus:
    """Whether any rank wishes to stop, known to all at the same step, without a wait.

    Each step's wishes travel while the next step runs and are read at its end, so with several ranks the answer comes
    one step late. Every rank must ask once a step.
    """

    def __init__(self, ranks: Ranks) -> None:
        """``ranks``: those who must agree; a single one agrees at once."""
        self.ranks = ranks
        self._wish = torch.zeros(1, dtype=torch.int32)
        self._travelling: Any = None

    def ask(self, wish: bool) -> bool:
        """Whether any rank had the wish when the step before ended; sends this rank's own on its way."""
        if self.ranks.count == 1:
            return wish
        answer = self._arrived()
        self._wish = torch.tensor([int(wish)], dtype=torch.int32)
        self._travelling = dist.all_reduce(self._wish, dist.ReduceOp.MAX, group=self.ranks.group, async_op=True)
        return answer

    def settle(self, wish: bool) -> bool:
        """Whether any rank has had the wish until now; waits for all."""
        earlier = self._arrived()
        return self.ranks.any(wish or earlier)

    def _arrived(self) -> bool:
        if self._travelling is None:
            return False
        self._travelling.wait()
        self._travelling = None
        return bool(self._wish[0])


def summed_over_ranks(values: Sequence[float | torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The sums over ranks of host numbers and 0-d tensors on ``device``, as 0-d float64 tensors there; no host wait."""
    numbers = torch.tensor([0.0 if isinstance(value, torch.Tensor) else value for value in values], dtype=torch.float64)
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            numbers[place].copy_(value.detach())
    dist.all_reduce(numbers)
    return list(numbers.unbind())


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """``train.seed is 0 and 1, adapter.rank is 4 and 8``, and how many more."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    told = [f"{name} is {ours.get(name, 'not given')} and {theirs.get(name, 'not given')}" for name in names[:TOLD]]
    return ", ".join(told) + (f", and {len(names) - TOLD} more" if len(names) > TOLD else "")


def _connect(local: int) -> None:
    """Connects to the other ranks: gloo for the host, NCCL for the devices where there are any."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return
    here, devices = _from_environment("LOCAL_WORLD_SIZE", str(local + 1)), torch.cuda.device_count()
    if here > devices:
        raise InputError(f"{here} processes on this machine > its {devices} GPUs; start one process for each GPU")
    torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl")


def _launched() -> tuple[int, int, int]:
    """How many processes the environment speaks of, this one's number, and that on its machine.

    What can't be is told before anybody waits: of numbers that are no process's, the others would wait for good.
    """
    if "WORLD_SIZE" not in os.environ:
        check_alone()
        return 1, 0, 0
    count = _from_environment("WORLD_SIZE", None)
    alone = "0" if count == 1 else None
    index, local = _from_environment("RANK", alone), _from_environment("LOCAL_RANK", alone)
    here = _from_environment("LOCAL_WORLD_SIZE", str(count))
    for name, value, of, limit in (
        ("RANK", index, "WORLD_SIZE", count),
        ("LOCAL_RANK", local, "LOCAL_WORLD_SIZE", here),
    ):
        if value >= limit:
            raise InputError(f"{name} is {value} in the environment and must be < {of}, which is {limit}; {LAUNCHER}")
    return count, index, local


def _from_environment(name: str, default: str | None) -> int:
    text = os.environ.get(name, default)
    if text is None:
        raise InputError(f"{name} is not set in the environment, and WORLD_SIZE says several processes; {LAUNCHER}")
    if not text.isdecimal():
        raise InputError(f"{name} is {text!r} in the environment, not a whole number; {LAUNCHER}")
    return int(text)
