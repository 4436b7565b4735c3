"""Versions of this package and of what it stands on, for records and bug reports."""

from importlib.metadata import PackageNotFoundError, version

SLIPSTREAM = "0.1.0"
"""This package's version; ``pyproject.toml`` reads it from here, so that a source tree knows it without an install."""
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "datasets", "trl", "bitsandbytes", "xformers")


def installed_version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def library_versions() -> dict[str, str | None]:
    """The libraries that results depend on, None where not installed."""
    return {name: installed_version(name) for name in LIBRARIES}
