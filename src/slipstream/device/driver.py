"""The NVIDIA driver's version, asked of its own tool: torch doesn't tell it."""

import shutil
import subprocess


def driver_version() -> str | None:
    """The NVIDIA driver's version, or none if no driver answers."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0] if answer else None
