"""The offload benchmark's arms compute the same, count their copies, and stand beside what the formulas say."""

from typing import Any

import pytest
import torch

from slipstream.bench import offload, offload_table
from slipstream.bench.harness import WHOLE
from slipstream.bench.offload import ARMS, GradientsDifferError, OffloadBench, cases, comparisons, csv_rows, prove_equal
from slipstream.bench.offload_arms import AUTO, BACKWARD, DOUBLE, FORWARD, RECOMPUTE, SINGLE, UPDATE, Bench, Row, steps
from slipstream.bench.offload_trace import covered, merged, shares
from slipstream.bench.shapes import long_documents, shape_config
from slipstream.errors import InputError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    saved: list[int] = []
    asked = OffloadBench(shapes=("tiny",), tokens=(128,), rounds=2, warmup=1, layers=3)
    found = offload.run(asked, lambda _: None, lambda document: saved.append(len(document["rows"])))
    assert saved == [1]
    return found


def test_a_case_is_measured_whole(result: dict[str, Any]) -> None:
    (row,) = result["rows"]
    assert (row["shape"], row["layers"], row["tokens"], row["dtype"]) == ("tiny", 3, 128, "float32")
    assert row["input_bytes"] == 128 * 64 * 4
    assert set(row["arms"]) == set(ARMS)
    assert row["gradients"] == {"recompute_again": 0.0, SINGLE: 0.0, DOUBLE: 0.0, AUTO: 0.0}
    for arm in row["arms"].values():
        assert {len(values) for values in arm["seconds"].values()} == {2}
        assert set(arm["seconds"]) == {FORWARD, BACKWARD, UPDATE, WHOLE}
    assert "copies" not in row["arms"][RECOMPUTE]
    for name, buffers in ((SINGLE, 1), (DOUBLE, 2), (AUTO, 2)):
        copies = row["arms"][name]["copies"]
        assert copies["buffers"] == buffers
        assert copies["out_bytes"] == copies["back_bytes"] == 2 * row["input_bytes"]
        assert copies["traced"] is None
        assert 0 < copies["link_share"]["back"] < 1
    assert row["link_bytes_per_second"]["back"] == pytest.approx(row["input_bytes"] / row["c"])


def test_without_a_card_there_is_nothing_to_predict(result: dict[str, Any]) -> None:
    (row,) = result["rows"]
    assert row["predicted"] is None
    assert row["not_measured"].startswith("nothing was measured: without a card no input leaves the device")
    assert {(one["predicted_seconds"], one["holds"]) for one in row["comparisons"]} == {(None, None)}
    told = offload_table.summary(result)
    assert (told["predictions"], told["held"], told["left_out"]) == (0, 0, 1)
    assert told["largest_ratio_to_recompute"] is None


def test_both_schedules_are_predicted() -> None:
    c, g = 0.01, 0.03
    found = offload._predicted(3, c, g)
    assert found["T_single"] - found["T_double"] == pytest.approx(found["saved"]) == pytest.approx(2 * min(c, g))


def test_every_comparison_is_there_and_flat(result: dict[str, Any]) -> None:
    rows = csv_rows(result)
    assert [(row["arm"], row["against"], row["part"]) for row in rows] == [
        (DOUBLE, SINGLE, BACKWARD),
        (DOUBLE, SINGLE, WHOLE),
        (AUTO, SINGLE, BACKWARD),
        (SINGLE, RECOMPUTE, WHOLE),
        (DOUBLE, RECOMPUTE, WHOLE),
        (AUTO, RECOMPUTE, WHOLE),
    ]
    assert len({tuple(row) for row in rows}) == 1


def test_what_is_compared() -> None:
    """The second buffer saves 20 ms, of 125."""
    times = {
        name: {part: [seconds, seconds + 0.001] for part in (BACKWARD, WHOLE)}
        for name, seconds in ((RECOMPUTE, 0.1), (SINGLE, 0.125), (DOUBLE, 0.105), (AUTO, 0.105))
    }
    first, *_, last = comparisons(times, 0.02)
    assert first["predicted_seconds"] == pytest.approx(0.02)
    assert first["saved_seconds"] == pytest.approx(0.02)
    assert first["holds"]
    assert last["ratio"] == pytest.approx(1.05, abs=1e-3)
    assert last["holds"] is None
    (off, *_) = comparisons(times, 0.03)
    assert not off["holds"]


def test_an_arm_that_computes_something_else_is_an_error() -> None:
    bench = Bench.of(shape_config("tiny", 2), CPU)
    row = Row.of(long_documents(64, 64, 100), 64, CPU)
    with steps(bench, row, ARMS, None) as arms:
        prove_equal(arms)
        put = arms[DOUBLE].put
        weight = bench.parameters[1]

        def other() -> None:
            put()
            weight.data.add_(0.1)

        arms[DOUBLE].put = other
        with pytest.raises(GradientsDifferError, match=r"offload-2: relative distance .* limit 0.0e"):
            prove_equal(arms)
    bench.close()


def test_arms_leave_the_model_and_the_host_as_they_were() -> None:
    bench = Bench.of(shape_config("tiny", 2), CPU)
    row = Row.of(long_documents(64, 64, 100), 64, CPU)
    with steps(bench, row, (DOUBLE,), None) as arms:
        arms[DOUBLE].run()
        pool = offload.offload_of(arms[DOUBLE]).pool
        assert pool.held > 0
    assert pool.held == 0
    assert not any(layer.gradient_checkpointing for layer in bench.base.model.layers)
    assert all(p.grad is None for p in bench.parameters)
    bench.close()


def test_compiled_layers_are_in_place_until_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_it(function, backend="eager", **options))
    bench = Bench.of(shape_config("tiny", 2), CPU, "compiled")
    row = Row.of(long_documents(64, 64, 100), 64, CPU)
    assert all("forward" in vars(layer) for layer in bench.base.model.layers)
    with steps(bench, row, ARMS, None) as arms:
        assert set(prove_equal(arms).values()) == {0.0}
    bench.close()
    assert not any("forward" in vars(layer) for layer in bench.base.model.layers)


def test_cases_by_device_and_words() -> None:
    assert [tokens for _, tokens in cases(OffloadBench(), CUDA)] == [49_152, 49_152, 24_576, 8_192]
    assert cases(OffloadBench(), CPU) == [("tiny", 256)]
    assert cases(OffloadBench(shapes=("qwen3-32b",)), CUDA) == [("qwen3-32b", 24_576)]
    assert cases(OffloadBench(shapes=("qwen3-8b",)), CUDA) == [("qwen3-8b", 49_152)]
    assert cases(OffloadBench(shapes=("tiny",), tokens=(64, 128)), CUDA) == [("tiny", 64), ("tiny", 128)]


def test_a_case_that_does_not_fit_is_a_row_with_the_reason() -> None:
    asked = OffloadBench(shapes=("tiny",), tokens=(64,), rounds=2, layers=2, host_limit=1e-6)
    (row,) = offload.run(asked, lambda _: None)["rows"]
    assert "1 layer input of" in row["refused"]
    assert "memory.host_limit" in row["refused"]


# The trace


def event(cat: str, name: str, ts: float, dur: float, nbytes: int = 0) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"bytes": nbytes}}


def test_hidden_share_of_copies() -> None:
    events = [
        event("kernel", "gemm", 0, 50),
        event("kernel", "norm", 40, 20),
        event("kernel", "late", 90, 10),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 10, 40, 64),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 50, 50, 64),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 1000, 8),  # not a layer's input
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 1000, 64),
        event("cpu_op", "aten::mm", 60, 30),
        {"name": "no category"},
    ]
    found = shares(events, 64)
    assert found["out"] == {"count": 1, "seconds": pytest.approx(40e-6), "hidden_share": pytest.approx(1.0)}
    assert found["back"] == {"count": 1, "seconds": pytest.approx(50e-6), "hidden_share": pytest.approx(0.4)}
    assert found["both"]["hidden_share"] == pytest.approx(60 / 90)
    assert shares([], 64)["back"] == {"count": 0, "seconds": 0, "hidden_share": None}


def test_unions_of_intervals() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert covered((1, 10), [(0, 2), (4, 5), (9, 20)]) == 1 + 1 + 1


# What can't be asked for


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"shapes": ("qwen3-9b",)}, "did you mean qwen3-"),
        ({"tokens": (12,)}, "tokens 12 < 64"),
        ({"rounds": 1}, "rounds 1 < 2"),
        ({"cap": 0.0}, "--cap 0.0 <= 0"),
        ({"host_limit": -1.0}, "--host-limit -1.0 <= 0"),
    ],
)
def test_bad_options_are_told(words: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        OffloadBench(**words)


@pytest.mark.parametrize(("tokens", "longest"), [(49_152, 8_192), (1000, 8_192), (10_000, 10_000), (8_200, 8_192)])
def test_long_documents_fill_the_row(tokens: int, longest: int) -> None:
    lengths = [len(one["input_ids"]) for one in long_documents(tokens, longest, 100)]
    assert sum(lengths) == tokens
    assert max(lengths) == min(longest, tokens)
    assert len(lengths) == 1 or longest < tokens
