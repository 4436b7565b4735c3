"""Static batches: refilled in place, of a few shapes, never with a wrong boundary."""

import pytest
import torch

from slipstream.device.feed import PackedCollator
from slipstream.device.segments import Segments
from slipstream.device.static_batch import BatchShape, StaticBatch
from slipstream.errors import InputError


def batch(*lengths: int, tokens: int = 64) -> dict:
    examples = [{"input_ids": list(range(3, 3 + n)), "labels": list(range(3, 3 + n))} for n in lengths]
    return PackedCollator(tokens=tokens)(examples)


def test_a_shape_takes_few_values() -> None:
    shapes = {BatchShape.of(batch(*[size] * (4000 // size), tokens=4096)) for size in range(1, 4000, 13)}
    assert len(shapes) <= 12
    assert all(shape.tokens == 4096 for shape in shapes)
    one = BatchShape.of(batch(64))
    assert one.holds(BatchShape.of(batch(1, 2, 3)))
    assert not one.holds(BatchShape.of(batch(64, tokens=65)))


def test_buffers_hold_each_batch_in_turn() -> None:
    first, second = batch(9, 20, 3), batch(30, 1, 1, 1, 1)
    static = StaticBatch(BatchShape.of(second), torch.device("cpu"))
    addresses = {name: static.inputs[name].data_ptr() for name in ("input_ids", "labels", "position_ids")}
    for given in (first, second, first):
        static.fill(given, 7.0)
        for name, address in addresses.items():
            assert torch.equal(static.inputs[name], given[name])
            assert static.inputs[name].data_ptr() == address
        segments = static.segments
        assert torch.equal(segments.segment_ids, given["segments"].segment_ids)
        ends = segments.cu_seqlens.tolist()
        real = [0, *torch.tensor(given["segments"].lengths).cumsum(0).tolist()]
        assert ends == real + [64] * (len(ends) - len(real))
        assert float(static.learned) == 7.0


def test_derived_structures_follow_once_forgotten() -> None:
    first, second = batch(9, 20, 3), batch(30, 1)
    static = StaticBatch(BatchShape.of(first), torch.device("cpu"))
    for given in (first, second):
        static.fill(given, 1.0)
        static.segments.forget()
        assert torch.equal(static.segments.mask(torch.float32, 4), given["segments"].mask(torch.float32, 4))
        assert torch.equal(static.segments.mask(torch.float32), given["segments"].mask(torch.float32))
        assert static.segments.on("cpu") is static.segments


def test_what_does_not_fit_is_refused() -> None:
    static = StaticBatch(BatchShape(64, 64, 16), torch.device("cpu"))
    with pytest.raises(AssertionError):
        static.fill(batch(17, 3), 1.0)
    with pytest.raises(AssertionError):
        static.segments.fill(Segments.from_lengths([3]))
    with pytest.raises(InputError, match="attention_mask, which a captured step has no buffer for"):
        static.fill(batch(3) | {"attention_mask": torch.ones(1, 64)}, 1.0)
    with pytest.raises(InputError, match="no segments"):
        BatchShape.of({"input_ids": torch.zeros(1, 4)})
