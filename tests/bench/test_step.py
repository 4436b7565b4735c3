"""The benchmark of whole steps: the floor's formula, every mode measured, kernels sorted into parts."""

import json
import sys

import pytest

from packed import model_of, with_adapter
from slipstream import cli
from slipstream.bench.shapes import shape_config
from slipstream.bench.step import StepBench, floor_seconds, kind_of, multiplying_parameters
from slipstream.bench.step_command import csv_rows, options
from slipstream.errors import InputError
from slipstream.transform import base_model


def test_the_floor_is_the_published_figures() -> None:
    """Qwen3-8B without its input embedding, 8,192 tokens, recompute, at 790 TFLOP/s: 471 ms."""
    assert floor_seconds(7_568_000_000, 8192, 790e12, recompute=True) == pytest.approx(0.471, rel=2e-3)
    assert floor_seconds(600_000_000, 4096, 790e12, recompute=False) == pytest.approx(0.0124, rel=1e-2)


def test_embeddings_are_looked_up_and_heads_multiply() -> None:
    for tied in (False, True):
        base = base_model(with_adapter(model_of("llama", tie_word_embeddings=tied)))
        linear = sum(m.weight.numel() for n, m in base.named_modules() if n.endswith("base_layer"))
        assert multiplying_parameters(base.config) == linear + base.get_output_embeddings().weight.numel()


def test_of_experts_only_those_that_a_token_is_given_to_multiply() -> None:
    config = shape_config("tiny-mixture")
    one = 3 * config.hidden_size * config.intermediate_size
    config.num_experts_per_tok = 1
    fewer = multiplying_parameters(config)
    config.num_experts_per_tok = 3
    assert multiplying_parameters(config) - fewer == 2 * one * config.num_hidden_layers


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopB_TNT", "matrix products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("triton_red_fused__to_copy_logsumexp_0", "loss"),
        ("triton_poi_fused_add_mul_silu_3", "rest"),
        ("Memcpy DtoD (Device -> Device)", "rest"),
    ],
)
def test_kernels_are_sorted_by_name(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_modes_are_measured_side_by_side(monkeypatch, capfd) -> None:
    words = [
        "--shape",
        "tiny",
        "--tokens",
        "64",
        "--layers",
        "2",
        "--rounds",
        "2",
        "--mode",
        "eager,captured",
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", ["slipstream", "bench", "step", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    result = json.loads(capfd.readouterr().out)
    (row,) = result["rows"]
    eager, captured = row["modes"]["eager"], row["modes"]["captured"]
    assert eager["ran"] == "eager"
    assert eager["seconds"] > row["floor_seconds"] > 0
    assert eager["share_of_floor"] == pytest.approx(row["floor_seconds"] / eager["seconds"])
    assert "CUDA graphs need a CUDA device" in captured["refused"]
    assert [one["mode"] for one in csv_rows(result)] == ["eager"]


def test_what_can_not_be_measured_is_told_first() -> None:
    with pytest.raises(InputError, match="--mode 'fast' is none of"):
        StepBench(modes=("fast",))
    with pytest.raises(InputError, match="--activations 'drop' is none of"):
        options(activations="drop")
    with pytest.raises(InputError, match="shape 'qwen' is unknown"):
        options(shape="qwen")
