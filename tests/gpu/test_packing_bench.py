"""The packing benchmark on a card: every attention choice, all arms the same, builds counted."""

import pytest
import torch

from slipstream.bench import packing
from slipstream.bench.harness import CudaClock, clock_for
from slipstream.bench.packing import PackingBench
from slipstream.bench.wasteful import choices


@pytest.mark.parametrize("attention", choices())
def test_every_choice_is_measured(attention: str) -> None:
    asked = PackingBench(shapes=("tiny",), tokens=(512,), attention=(attention,), rounds=2, warmup=1, layers=3)
    keep, recompute = packing.run(asked, lambda _: None)["rows"]
    if attention == "xformers" and "not installed" in keep.get("refused", ""):
        pytest.skip(keep["refused"])
    for row, passes in ((keep, 1), (recompute, 2)):
        assert "refused" not in row, row["refused"]
        assert row["dtype"] == "bfloat16"
        structures = 0 if attention == "varlen" else 1
        assert row["arms"]["slipstream"]["builds"] == {"metadata": 1, "structures": structures}
        rebuilt = row["arms"]["wasteful-vectorised"]["builds"]
        assert rebuilt == {"metadata": 3 * passes, "structures": 3 * passes * structures}
        assert all(value > 0 for value in row["builds"].values())


def test_events_time_the_device_and_not_the_host() -> None:
    clock = clock_for(torch.device("cuda"))
    assert isinstance(clock, CudaClock)
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(2):  # the first finds the kernel
        clock.start()
        y = x
        for _ in range(50):
            y = x @ x
        clock.mark()
        clock.mark()
        work, nothing = clock.seconds()
    assert y.shape == x.shape
    assert work > 10 * nothing > 0
