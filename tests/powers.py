"""A test as root meets the rights of files like anybody else."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

VERSION_3, THIS_THREAD = 0x20080522, 0
OVERRIDES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, by which root reads and writes what the rights of files forbid."""


@contextmanager
def rights_hold() -> Iterator[None]:
    """Lay down the capabilities that pass over the rights of files, and take them up again; Linux."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION_3, THIS_THREAD)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice 32 of them
    assert libc.capget(header, sets) == 0
    held, sets[0] = sets[0], sets[0] & ~OVERRIDES
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = held
        assert libc.capset(header, sets) == 0
