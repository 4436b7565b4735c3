"""Work on chunks, spread over all cores, with results in order and few chunks in memory.

The first chunks are worked on here: most sets end with them, and a process takes seconds to start. Then each of several
processes works on one chunk at a time, while at most two for each are on their way: a source of any length is read no
faster than its results are taken. The alternative, `multiprocessing.Pool.imap`, reads the whole source at once.

Processes are spawned, not forked: threads (the tokenizer's, the process group's) and a device's state don't survive a
fork. What works is pickled to each of them once.
"""

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Generic, TypeVar

from slipstream.errors import InputError

Chunk = TypeVar("Chunk")
Result = TypeVar("Result")
ALONE = 32
"""Chunks worked on here before processes are started."""
AHEAD = 2
"""Chunks for each process that are being worked on, or done and not yet taken."""
MOST = 32
"""Processes; each takes some 200 MB for its libraries, and reading the source keeps up with no more."""


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def in_order(
    work: Callable[[Chunk], Result], chunks: Iterable[Chunk], *, processes: int | None = None, alone: int = ALONE
) -> Iterator[Result]:
    """``work(chunk)`` for each chunk, in order; ``processes``: as many as there are cores if not given.

    What ``work`` raises is raised here. Raises ``InputError`` where a process is killed (out of memory, mostly).
    """
    processes = min(cores(), MOST) if processes is None else processes
    source = iter(chunks)
    yield from map(work, islice(source, alone))
    following = next(source, None)
    if following is None:
        return
    rest = chain([following], source)
    if processes < 2:
        yield from map(work, rest)
        return
    workers = _Workers(work, processes)
    try:
        yield from _spread(workers, rest, processes)
    finally:
        workers.end()


def _spread(workers: "_Workers[Chunk, Result]", chunks: Iterable[Chunk], processes: int) -> Iterator[Result]:
    with ThreadPoolExecutor(processes) as threads:
        waiting: deque[Future[Result]] = deque()
        try:
            for chunk in chunks:
                waiting.append(threads.submit(workers, chunk))
                if len(waiting) >= AHEAD * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class _Workers(Generic[Chunk, Result]):
    """Processes that each hold ``work``; called from a thread for each of them."""

    def __init__(self, work: Callable[[Chunk], Result], count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(work, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
            self._idle.put(here)

    def __call__(self, chunk: Chunk) -> Result:
        """The result of ``chunk``, from the next process that is idle."""
        connection = self._idle.get()
        try:
            connection.send(chunk)
            result, error = connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise InputError(
                "a process that tokenises was killed, for want of memory most likely; free some, or give shorter rows"
            ) from error
        finally:
            self._idle.put(connection)
        if error is not None:
            raise error
        made: Result = result
        return made

    def end(self) -> None:
        """Ends the processes, whatever they are at."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.terminate()
            process.join()


def _serve(work: Callable[[Chunk], Result], connection: Connection) -> None:
    """What a process does: a chunk in, its result or the user's error out, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of this process alone: the cores are taken by its like
    while True:
        try:
            chunk = connection.recv()
        except EOFError:
            return
        try:
            connection.send((work(chunk), None))
        except InputError as error:
            connection.send((None, error))
