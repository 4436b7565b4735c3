"""For every test: no network, and where there is no card, tests that need one are skipped with the reason."""

import gc
import os
from collections.abc import Iterator
from functools import cache

import pytest

# Read once, when huggingface_hub is imported, hence here. Nothing may come from the hub: tests make their own models.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing_a_card = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_a_card:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing_a_card:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What was imported stays, and is not looked through again by each collection of garbage.

    Trainers collect several times in each training: among a million objects of imported libraries that takes most of a
    small training's time, and nothing of it is ever found to be garbage.
    """
    _settle()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The same after each file, whose fixtures are gone by now, for what was imported at need."""
    yield
    if nextitem is None or nextitem.path != item.path:
        _settle()


@pytest.fixture(scope="session", autouse=True)
def _ceilings_are_measured_once() -> Iterator[None]:
    """A CPU's ceilings are measured for each run anew: half a second each, the same each time."""
    from slipstream.device import ceilings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "measure", cache(ceilings.measure))
        yield


@pytest.fixture(scope="module")
def unreported() -> Iterator[None]:
    """Runs end without their report, half of a small run's time, in files that are about something else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slipstream.run.write_report", lambda folder: folder / "report.html")
        yield


def _settle() -> None:
    gc.collect()
    gc.freeze()
