"""Everything here needs a card."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
