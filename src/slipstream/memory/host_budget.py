"""How much host memory offloaded activations may take, and what to say where that is too little.

A plan and a training ask the same function, so that a plan finds what training will find. What is free now is what
counts: pages that are pinned can't be swapped out, so a budget beyond it ends in the kernel killing somebody. The price
is a refusal where memory would have become free in time; the alternative, taking pages until the system refuses, ends a
run in its first step or, where the system promises more than it has, without a word.

    memory.host_limit   of each machine, for all its processes together; without it 80% of what is free there
    what is free        the kernel's word, or what the container has left, if less: no limit reaches beyond
    one process         an equal part, for a launcher starts as many processes as there are cards (LOCAL_WORLD_SIZE)
"""

import os
from dataclasses import dataclass

from slipstream.cost.hardware import free_host_memory
from slipstream.cost.sizes import size_text
from slipstream.data.account import counted

SHARE = 0.8
"""Of what is free, where the user names no limit: loaders, checkpoints and others need some too."""
GIB = 2**30
UNLIMITED = 2**62


@dataclass(frozen=True)
class HostBudget:
    """Host memory that one process may take, in bytes, and where the number comes from."""

    nbytes: int
    limit: int | None = None
    """What the user allows all processes of this machine; None: nothing said."""
    free: int | None = None
    """What the machine has free for them; None: not known."""
    processes: int = 1

    @property
    def cut(self) -> str | None:
        """What to say of a limit that goes beyond what is free, or None."""
        if self.limit is None or self.free is None or self.limit <= self.free:
            return None
        return f"memory.host_limit is {size_text(self.limit)}, but only {size_text(self.free)} of host memory is free"

    @property
    def why(self) -> str:
        """Where the number comes from; empty where nothing is known of it."""
        shared = f", in equal parts for {self.processes} processes" if self.processes > 1 else ""
        if (found := self.cut) is not None:
            return found + shared
        if self.limit is not None:
            return f"memory.host_limit{shared}"
        return "" if self.free is None else f"{SHARE:.0%} of the {size_text(self.free)} that are free{shared}"

    def shortage(self, layers: int, nbytes: int, *, taken: int = 0, refused: str = "") -> str:
        """What to say where ``layers`` inputs of ``nbytes`` each exceed it: how much is needed, free, what to change.

        ``taken``: bytes that the system gave before it ``refused`` more, and how.
        """
        needed = layers * nbytes
        inputs = f"{counted(layers, 'layer input')} of {size_text(nbytes)}"
        told = f"activations: offload needs {size_text(needed)} of host memory ({inputs})"
        if refused:
            had = f"; the system gave {size_text(taken)} and refused more ({refused})"
            return f"{told}{had}; {self._ways('free host memory or raise the limit on it (ulimit -v)')}"
        why = f" ({self.why})" if self.why else ""
        return f"{told} and may take {size_text(self.nbytes)}{why}; {self._ways(self.room_for(needed))}"

    def _ways(self, first: str) -> str:
        recompute = "set memory.activations: recompute"
        if self.limit is not None:
            recompute += " and memory.host_limit: null"  # which has no effect then, and is refused
        return f"{first}, lower packing.tokens or packing.rows, or {recompute}"

    def room_for(self, needed: int) -> str:
        """How this process gets ``needed`` bytes: by the limit alone where they are free, else by freeing memory."""
        together = needed * self.processes
        raised = f"{'set' if self.limit is None else 'raise'} memory.host_limit to {_up(together)}"
        if self.free is None:
            return "free host memory or raise memory.host_limit" if self.limit is None else raised
        if together <= self.free:
            return raised
        freed = f"free {size_text(together - self.free)} more of host memory"
        return freed if self.limit is not None and self.limit >= together else f"{freed} and {raised}"


def host_budget(limit_gib: float | None) -> HostBudget:
    """What this process may take of this machine's host memory; ``limit_gib``: the user's limit for the machine."""
    return budget_of(limit_gib, free_host_memory())


def budget_of(limit_gib: float | None, free: float | None) -> HostBudget:
    """The same of a machine with ``free`` bytes of host memory; None: not known, so that only a limit counts."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limit = None if limit_gib is None else int(limit_gib * GIB)
    usable = UNLIMITED if free is None else int(free) if limit is not None else int(SHARE * free)
    together = usable if limit is None else min(limit, usable)
    return HostBudget(together // processes, limit, None if free is None else int(free), processes)


def _up(nbytes: int) -> str:
    """GiB for a recipe, rounded up to a tenth."""
    return f"{-(-nbytes * 10 // GIB) / 10:g}"
