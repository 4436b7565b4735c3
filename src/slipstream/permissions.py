"""Files as readable as the umask lets them be, whoever wrote them.

safetensors, like other writers of whole files, writes to a temporary file that its owner alone may read, and the
finished file keeps that: a model merged on a shared disk could be read by nobody else. The umask itself can only be
asked for by setting it, for all threads at once, so a file is made and looked at instead; that also tells what a
folder's default access list grants. Alternative: reading ``/proc``, which other systems lack.
"""

import os
import stat
from pathlib import Path


def as_umask_says(folder: Path) -> None:
    """Gives all files in ``folder``, at any depth, the rights that a file made there by ``open`` gets; takes none."""
    granted = _granted(folder)
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode | granted != mode:
            path.chmod(mode | granted)


def _granted(folder: Path) -> int:
    """The rights of a new file in ``folder``."""
    probe = folder / f".rights.{os.getpid()}"
    handle = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        return stat.S_IMODE(os.fstat(handle).st_mode)
    finally:
        os.close(handle)
        probe.unlink()
