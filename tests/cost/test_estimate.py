"""Dense masks and what metadata built once saves, by hand."""

import pytest

from slipstream.cost.estimate import (
    dense_mask_bytes,
    packing_saved_forward,
    packing_saved_seconds,
)


def test_packing_saves_all_builds_but_one() -> None:
    assert packing_saved_seconds(16, 0.0137, recompute=False) == pytest.approx(0.206, rel=0.005)  # the published two
    assert packing_saved_seconds(28, 0.0137, recompute=False) == pytest.approx(0.370, rel=0.005)
    assert packing_saved_seconds(28, 0.01, recompute=True) == pytest.approx(55 * 0.01)
    assert packing_saved_forward(28, 0.01) == pytest.approx(27 * 0.01)
    assert packing_saved_seconds(1, 0.01, recompute=False) == 0


def test_bytes_of_dense_masks() -> None:
    assert dense_mask_bytes(2048, 2) == 2048 * 2048 * 4
    assert dense_mask_bytes(2048, 2, kept=16) == 2048 * 2048 * 34
