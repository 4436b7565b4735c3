"""Bytes in words."""

import pytest

from slipstream.cost.sizes import size_text


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (0.04 * 2**30, "41.0 MiB"),
        (13.25 * 2**30, "13.2 GiB"),
        (2**70, "1024.0 EiB"),
    ],
)
def test_the_unit_has_digits_to_show(value: float, told: str) -> None:
    assert size_text(value) == told
