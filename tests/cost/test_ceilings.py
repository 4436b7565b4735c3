"""Named devices: their figures, and what is asked of a name."""

import pytest

from slipstream.cost.ceilings import SHEETS, named_device
from slipstream.cost.hardware import compute_dtype
from slipstream.errors import InputError


def test_the_card_that_was_measured() -> None:
    device, rates = named_device("H200")
    assert device.compute_capability == (9, 0)
    assert rates.matmul == pytest.approx(794e12, rel=0.01)
    assert rates.copy == pytest.approx(4.27e12, rel=0.01)
    assert rates.to_device == pytest.approx(55.2e9, rel=0.01)
    assert rates.pageable == pytest.approx(17.5e9, rel=0.02)
    assert rates.source == "data sheet"


@pytest.mark.parametrize("name", SHEETS)
def test_every_name_is_whole(name: str) -> None:
    device, rates = named_device(name)
    assert device.kind == "cuda"
    assert rates.dtype == compute_dtype(device) == ("bfloat16" if device.bf16 else "float32")
    assert 1e12 < rates.matmul < 3e15
    assert device.memory_bytes > 5 * 2**30
    assert (rates.to_device is None) == device.unified_memory


def test_spelling() -> None:
    assert named_device("RTX 4090 Laptop") == named_device("rtx-4090-laptop")
    with pytest.raises(InputError, match=r"'h20' is no known device; did you mean h200.*doctor --json"):
        named_device("h20")
