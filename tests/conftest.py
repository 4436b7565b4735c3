"""For every test: no network, and where there is no card, tests that need one are skipped with the reason."""

import os

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
