"""A disk that takes no more, whichever way it is told.

Why: a full disk, a quota and a limit of file sizes (``ulimit -f``) all end a write, and none of them is our fault.
Python tells them by number; libraries in Rust and C++ put them into words, tokenizers' as a bare ``Exception``. Whoever
writes asks here whether that is what happened, and what to say of the room there is. Alternative: looking at the free
space before a write, which knows nothing of quotas and of other writers.
"""

import errno
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import InputError

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The system's numbers for a write that found no room: a full disk, a quota, a file beyond the largest allowed."""
_NUMBER = re.compile(r"\bos error (\d+)\b")
_WORDS = ("No space left", "PytorchStreamWriter failed", "unexpected pos")


def full_disk(error: BaseException) -> int | None:
    """The number in ``NO_SPACE`` that an exception stands for, in its ``errno`` or in its words; None for any other."""
    if isinstance(error, InputError):  # told already
        return None
    number = getattr(error, "errno", None)
    if number is None and (found := _NUMBER.search(str(error))):
        number = int(found[1])
    if number is None and any(word in str(error) for word in _WORDS):
        return errno.ENOSPC
    return number if number in NO_SPACE else None


class FullDiskTold:
    """A context in which a write that finds no room becomes an ``InputError``.

    It looks at exceptions as they leave, and catches none: tokenizers' has no narrower class than ``Exception``.
    """

    def __init__(self, folder: Path, told: Callable[[str], str]) -> None:
        """``folder``: where is written; ``told``: the message, given what room there is."""
        self._folder, self._told = folder, told

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises the ``InputError``; any other exception goes on its way."""
        if isinstance(error, Exception) and (number := full_disk(error)) is not None:
            raise InputError(self._told(room_in(self._folder, number))) from error


def room_in(folder: Path, number: int) -> str:
    """What there is room for in ``folder``, where a write ended with ``number``: for a message, with the remedy where
    freeing space is none.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    told = f"{free:,} bytes ({free / 1e9:,.2f} GB) free"
    if number == errno.EFBIG:
        most = _largest_file()
        return f"{told}, but " + (
            "the file is larger than that file system takes"
            if most is None
            else f"no file may have more than {most:,} bytes: raise that limit (ulimit -f)"
        )
    return f"{told}, but a quota is used up" if number == errno.EDQUOT else told


def _largest_file() -> int | None:
    """Bytes that this process's files may have; None for no limit."""
    if sys.platform == "win32":  # knows no such limit
        return None
    import resource

    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if most == resource.RLIM_INFINITY else most
