"""What fits, on a card that is not there: the cost model is asked, not the device."""

from dataclasses import replace

import pytest
import torch

from slipstream.bench import packing_fit
from slipstream.bench.packing_arms import Workbench
from slipstream.bench.packing_fit import default_tokens, needed_bytes, refuse_what_does_not_fit
from slipstream.bench.shapes import shape_config
from slipstream.cost.memory import layer_bytes, loss_workspace
from slipstream.device.segments import LARGEST_MASK_BYTES
from slipstream.errors import InputError


@pytest.fixture(scope="module")
def bench() -> Workbench:
    return Workbench.of(shape_config("tiny", 3), torch.device("cpu"))


def on_a_card(bench: Workbench) -> Workbench:
    return replace(bench, device=torch.device("cuda"))


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(packing_fit, "bench_free_bytes", lambda _: count)


def test_every_layer_keeps_a_mask_unless_it_is_recomputed(bench: Workbench) -> None:
    tokens = 1024
    job = packing_fit.job_of(bench, tokens, False)
    layer, loss = tokens * layer_bytes(job, job.shape.layers[0]), loss_workspace(job)
    assert loss > 8 * tokens * bench.base.config.vocab_size  # all logits and their gradient, in float32
    assert needed_bytes(bench, tokens, False) == int(3 * layer + loss) + tokens**2 * (3 * 4 + 2)
    inputs = 3 * tokens * bench.base.config.hidden_size * 4
    assert needed_bytes(bench, tokens, True) == int(inputs + layer + loss) + tokens**2 * (4 + 2)


def test_without_a_card_the_row_is_short(bench: Workbench) -> None:
    assert default_tokens(bench) == (256,)


def test_on_a_card_the_largest_row_is_the_last_that_fits(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, int(needed_bytes(bench, 4096, False) / 0.79))
    assert default_tokens(on_a_card(bench)) == (2048, 4096)
    free(monkeypatch, int(needed_bytes(bench, 4096, False) / 0.81))
    assert default_tokens(on_a_card(bench)) == (2048,)


def test_no_row_is_longer_than_the_model_takes(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2**60)
    assert default_tokens(on_a_card(bench)) == (2048, bench.base.config.max_position_embeddings)


def test_refused_only_where_it_does_not_fit(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, needed_bytes(bench, 1024, False))
    refuse_what_does_not_fit(bench, 1024, "sdpa", False)
    free(monkeypatch, needed_bytes(bench, 1024, False) - 1)
    with pytest.raises(InputError, match=r"one dense mask takes 6,291,456 bytes.*lower --tokens"):
        refuse_what_does_not_fit(bench, 1024, "sdpa", False)


def test_a_mask_beyond_the_limit_of_segments_is_refused(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2**60)
    tokens = 65_536
    assert tokens**2 * 6 > LARGEST_MASK_BYTES
    with pytest.raises(InputError, match=f"a mask may take {LARGEST_MASK_BYTES:,}"):
        refuse_what_does_not_fit(bench, tokens, "sdpa", True)
    refuse_what_does_not_fit(bench, tokens, "varlen", True)
