"""MLPs in tiles: how often they run, counted on real models, and what that adds to a predicted step."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cost.configs import GPT_OSS_20B, H200, LLAMA_1B, QWEN3_14B, config, job
from packed import documents, model_of, row_of, with_adapter
from slipstream import Options, apply
from slipstream.cost.flops import flops
from slipstream.cost.job import Job
from slipstream.cost.offload import Split
from slipstream.cost.shape import ModelShape
from slipstream.cost.step import elementwise_bytes, layer_launches, step_times, unpack_bytes
from slipstream.model.tiled_mlp import tiled_mlps
from slipstream.train.loss import summed_cross_entropy

LENGTHS, TILE = (18, 1, 12, 14), 16
GEMMA2 = config("gemma2", (2304, 26, 8, 4, 256, 9216, 256000), True)
MLP = 16 * 3 * 2048 * 8192
"""Weights of Llama-3.2-1B's MLPs."""


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("family", ["llama", "phi3", "starcoder2", "gemma2", "gemma3_text", "glm4", "olmo2"])
def test_how_often_a_tile_is_computed(family: str, activations: Any) -> None:
    """As predicted: a layer's own forward passes and what tiles add to them."""
    model = apply(with_adapter(model_of(family)).train(), Options(activations=activations, tiles=TILE))
    runs = _runs(model)
    predicted = _small(model.get_base_model().config, activations).tiling
    assert predicted.tiles == math.ceil(sum(LENGTHS) / TILE) > 1
    assert predicted.layers == 2
    assert runs == predicted.tiles * (predicted.forwards + predicted.again)
    assert runs // (2 * predicted.tiles) in (2, 3)


def _runs(model: Any) -> int:
    """Forward passes of tiles in a forward and backward."""
    seen: list[int] = []
    for tile in tiled_mlps(model):
        compute = tile.compute

        def counted(x: torch.Tensor, compute: Any = compute) -> torch.Tensor:
            seen.append(x.shape[-2])
            out: torch.Tensor = compute(x)
            return out

        tile.compute = counted  # type: ignore[method-assign]
    row = row_of(documents(LENGTHS), sum(LENGTHS))
    logits = model(**{name: value for name, value in row.items() if name != "labels"}).logits
    summed_cross_entropy(logits, row["labels"]).backward()
    return len(seen)


def _small(settings: Any, activations: str) -> Job:
    shape = ModelShape.of(settings)
    return Job(shape=shape, tokens=sum(LENGTHS), lengths=LENGTHS, activations=activations, tiles=TILE)


def both(values: dict[str, Any], **more: Any) -> tuple[Job, Job]:
    whole = job(values, 32768, **{"tiles": "none", **more})
    return whole, replace(whole, tiles=8192)


def test_kept_layers_compute_their_mlps_twice() -> None:
    whole, tiled = both(LLAMA_1B)
    assert tiled.tiling.again == 16
    assert flops(tiled).dense - flops(whole).dense == 2 * MLP * 32768
    adapters = 16 * 16 * 3 * (2048 + 8192)
    assert flops(tiled).adapters - flops(whole).adapters == 2 * adapters * 32768
    assert flops(tiled).attention == flops(whole).attention
    assert step_times(tiled, H200).total > 1.15 * step_times(whole, H200).total  # compute-bound at this length
    for mode in ("eager", "compiled"):
        slow, fast = (elementwise_bytes(replace(one, mode=mode)) for one in (tiled, whole))
        assert fast < slow < 4 / 3 * fast  # a part of one forward more, where a backward counts as two


def test_recomputed_layers_compute_nothing_more() -> None:
    whole, tiled = both(LLAMA_1B, activations="recompute")
    assert (tiled.tiling.layers, tiled.tiling.again) == (16, 0)
    assert flops(tiled) == flops(whole)
    assert elementwise_bytes(tiled) == elementwise_bytes(whole)


def test_a_norm_behind_the_mlp_needs_it_once_more() -> None:
    whole, tiled = both(GEMMA2, activations="recompute")
    assert tiled.tiling.again == 26
    assert flops(tiled).dense - flops(whole).dense == 2 * 26 * 3 * 2304 * 9216 * 32768


def test_layers_partly_kept() -> None:
    whole, tiled = both(LLAMA_1B, split=Split(6, 10, 0))
    assert tiled.tiling.again == 6
    assert flops(tiled).dense - flops(whole).dense == pytest.approx(2 * MLP * 32768 * 6 / 16)
    chosen = replace(tiled, tiles="auto", tokens=65536)
    assert (chosen.tiling.layers, chosen.tiling.again, chosen.tiling.tiles) == (10, 0, 8)


def test_kernels_and_four_bit_weights_once_a_tile() -> None:
    whole, tiled = both(LLAMA_1B)
    each = 3 + 3 * 3 + 3
    assert layer_launches(tiled) - layer_launches(whole) == 16 * each * (4 * (1 + 1 + 2) - (1 + 2))
    small = replace(tiled, tiles=256)
    assert step_times(small, H200).host > 5 * step_times(tiled, H200).host
    whole, tiled = both(QWEN3_14B, nf4=True)
    weights = 40 * 3 * 5120 * 17408
    assert unpack_bytes(tiled) - unpack_bytes(whole) == pytest.approx(2.5 * weights * (4 * (1 + 1 + 1) - (1 + 1)))


def test_mixtures_and_short_rows_have_no_tiles() -> None:
    for one in (job(GPT_OSS_20B, 65536, activations="recompute"), job(LLAMA_1B, 4096, tiles=8192)):
        assert one.tile is None
        assert one.tiling.extra(2) == one.tiling.again == 0


def test_adapters_beside_the_mlp_are_not_run_again() -> None:
    attention = tuple(size for size in ModelShape.of(LLAMA_1B).adapted() if 8192 not in size)
    whole, tiled = both(LLAMA_1B, adapted=attention)
    assert len(attention) == 4 * 16
    assert flops(tiled).adapters == flops(whole).adapters
