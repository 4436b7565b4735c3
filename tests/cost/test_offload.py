"""The reload schedules by hand and by simulation; which split of layers is the cheapest that fits."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cost.hardware import Device
from slipstream.cost.offload import (
    Demand,
    Split,
    cheapest_split,
    double_buffer_seconds,
    layer_input_bytes,
    rates_of,
    reload_saved_seconds,
    single_buffer_seconds,
    splits,
)

seconds = st.floats(0.001, 100)


def test_by_hand() -> None:
    assert single_buffer_seconds(4, 1.0, 3.0) == 16
    assert double_buffer_seconds(4, 1.0, 3.0) == 13
    assert reload_saved_seconds(4, 1.0, 3.0) == 3
    assert double_buffer_seconds(4, 3.0, 1.0) == 13  # the other way round: the link is the limit


@given(st.integers(1, 80), seconds, seconds)
def test_the_saving_is_the_difference(layers: int, c: float, g: float) -> None:
    saved = single_buffer_seconds(layers, c, g) - double_buffer_seconds(layers, c, g)
    assert saved == pytest.approx(reload_saved_seconds(layers, c, g), abs=1e-6)


@given(st.integers(1, 40), seconds, seconds, st.integers(1, 4))
def test_the_schedules_are_what_a_device_would_do(layers: int, c: float, g: float, buffers: int) -> None:
    """Copies in a row, each into a buffer that a layer's backward has left; layers in a row, each after its copy."""
    copied, done = [0.0] * layers, [0.0] * layers
    for i in range(layers):
        free = done[i - buffers] if i >= buffers else 0.0
        copied[i] = max(copied[i - 1] if i else 0.0, free) + c
        done[i] = max(copied[i], done[i - 1] if i else 0.0) + g
    if buffers == 1:
        assert done[-1] == pytest.approx(single_buffer_seconds(layers, c, g))
    else:
        assert done[-1] == pytest.approx(double_buffer_seconds(layers, c, g))  # a third buffer hides nothing more


def test_the_published_buffers_are_layer_inputs() -> None:
    for hidden, tokens, gigabytes in ((4096, 49_152, 0.37), (5120, 49_152, 0.47), (5120, 24_576, 0.23)):
        size = layer_input_bytes(SimpleNamespace(hidden_size=hidden), tokens, 2)
        assert size / 2**30 == pytest.approx(gigabytes, abs=0.01)


@pytest.mark.parametrize(("capability", "link"), [((9, 0), 54e9), ((8, 7), 20e9), ((12, 1), 45e9), ((6, 1), 12e9)])
def test_rates_of_classes(capability: tuple[int, int], link: float) -> None:
    assert rates_of(Device("cuda", "a card", 2**35, capability, bf16=True, unified_memory=False)).link == link


def test_rates_of_a_cpu_are_the_lowest() -> None:
    assert rates_of(Device("cpu", "a host", 2**35, None, bf16=True, unified_memory=True)).link == 12e9


# The choice

DEMAND = Demand(layers=4, kept_bytes=100, input_bytes=10, fixed_bytes=50, copy_seconds=0.2)


def test_peaks_by_hand() -> None:
    assert DEMAND.device_bytes(Split(4, 0, 0)) == 450
    assert DEMAND.device_bytes(Split(0, 4, 0)) == 140  # while a layer is recomputed
    assert DEMAND.device_bytes(Split(1, 3, 0)) == 180  # before the backward
    assert DEMAND.device_bytes(Split(0, 1, 3)) == 130  # one input, two buffers, one layer
    assert DEMAND.host_bytes(Split(0, 1, 3)) == 30
    more = replace(DEMAND, working_bytes=60, constant_bytes=1000)
    assert more.device_bytes(Split(4, 0, 0)) == 1460  # the last layer's backward is above the loss
    assert more.device_bytes(Split(0, 4, 0)) == 1200
    assert more.device_bytes(Split(0, 1, 3)) == 1190


@pytest.mark.parametrize(
    ("device", "host", "offload", "split"),
    [
        (450, 0, True, Split(4, 0, 0)),
        (449, 0, True, Split(3, 1, 0)),
        (180, 0, True, Split(1, 3, 0)),
        (179, 100, False, Split(0, 4, 0)),
        (140, 100, True, Split(0, 4, 0)),
        (139, 100, True, Split(0, 1, 3)),
        (139, 100, False, None),
        (139, 29, True, None),
        (129, 100, True, None),
    ],
)
def test_the_cheapest_that_fits(device: int, host: int, offload: bool, split: Split | None) -> None:
    assert cheapest_split(DEMAND, device, host, offload=offload) == split


def test_slow_copies_are_counted() -> None:
    """Where a copy outlasts a layer, an offloaded layer costs what shows of it."""
    hidden, shown = DEMAND.seconds(Split(0, 3, 1)), None
    slow = Demand(layers=4, kept_bytes=100, input_bytes=10, fixed_bytes=50, copy_seconds=5.0)
    shown = slow.seconds(Split(0, 3, 1))
    assert hidden == pytest.approx(4 + 0.03 * 4)
    assert shown == pytest.approx(hidden + 4.0 + 2.0)


@pytest.mark.parametrize(("layers", "offload"), product([1, 2, 5], [True, False]))
def test_every_split_is_tried_once(layers: int, offload: bool) -> None:
    found = list(splits(layers, offload=offload))
    assert len(found) == len(set(found))
    assert {split.layers for split in found} == {layers}
    assert all(split.recomputed >= 1 for split in found if split.offloaded)
    assert any(split.offloaded for split in found) == (offload and layers > 1)
