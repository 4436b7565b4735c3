"""Where Slipstream keeps what can be made again: converted models, measured ceilings, compiled code."""

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The folder for one kind of thing, not made yet: under ``$XDG_CACHE_HOME``, or ``~/.cache`` where it isn't set."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slipstream" / kind


def keep_compiled_code() -> None:
    """Let PyTorch's compiler keep its code there instead of in the system's temporary folder, which is emptied.

    The variable is PyTorch's own and the only way to tell it; one that the user has set is left alone. Where the folder
    can't be made, PyTorch's default stays.
    """
    folder = cache_folder("compiled")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
