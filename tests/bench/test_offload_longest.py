"""The longest rows: what fits, what does not and why, and where the straight line through two peaks leads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.bench import offload_longest
from slipstream.bench.offload_arms import DOUBLE, RECOMPUTE, Bench
from slipstream.bench.offload_longest import Longest, attempt, longest_document, predicted_tokens, rows
from slipstream.bench.progress import Progress
from slipstream.bench.shapes import shape_config

CPU = torch.device("cpu")


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench.of(shape_config("tiny", 2), CPU)
    yield made
    made.close()


def test_rows_of_both_arms() -> None:
    wanted = Longest(shape="tiny", mode="eager", packed=(128,), document=True, cap_bytes=10**9, host_limit=None)
    said: list[str] = []
    found = list(rows(shape_config("tiny", 2), wanted, CPU, Progress(said.append, 4, CPU)))
    assert [(row["arm"], row["row"], row["fits"]) for row in found] == [
        (DOUBLE, "packed", True),
        (RECOMPUTE, "packed", True),
        (DOUBLE, "one document", True),
        (RECOMPUTE, "one document", True),
    ]
    assert all(row["part"] == "longest" and row["layers"] == 2 and row["cap_bytes"] == 10**9 for row in found)
    assert [row["documents"] for row in found] == [1] * 4
    assert all("nothing was measured" in row["not_measured"] for row in found)
    assert [line.split(": ", 1)[1].split("; about ")[0] for line in said if " of 4: " in line] == wanted.names()
    assert wanted.names()[::2] == [
        "longest: tiny, offload-2, a row of 128 tokens",
        "longest: tiny, offload-2, the longest single document",
    ]


def test_a_row_that_does_not_fit_says_why(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    too_small = attempt(bench, DOUBLE, 64, host_limit=1e-6)
    assert not too_small["fits"]
    assert "host memory" in too_small["reason"]

    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(offload_longest, "_once", out_of_memory)
    found = attempt(bench, RECOMPUTE, 64, None)
    assert not found["fits"]
    assert found["reason"] == "out of memory"
    assert not any(layer.gradient_checkpointing for layer in bench.base.model.layers)


def test_the_longest_is_approached_and_stepped_down_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 100 MB, of which 10 are taken. A tile at work takes 20 MB beside 0.1 kB for each token, which is more
    than what longer rows hold; these take 1 kB a token, and a single document 8% more. Only what fits in short
    documents is tried as a long one.
    """
    tried: list[tuple[int, int]] = []

    def attempt(bench: Any, arm: str, tokens: int, host_limit: Any, longest: int = 8192) -> dict[str, Any]:
        tried.append((tokens, longest))
        peak = 10**7 + max(1000 * tokens, 2 * 10**7 + 100 * tokens)
        fits = peak * (1.08 if longest == tokens else 1) < 10**8
        head = {"arm": arm, "tokens": tokens, "documents": 1, "seconds": {"whole": 1.0}, "reason": "full"}
        return {**head, "peak_bytes": peak, "fits": fits}

    monkeypatch.setattr(offload_longest, "attempt", attempt)
    card: Any = type("Card", (), {"device": torch.device("cuda")})()
    said: list[str] = []
    best = longest_document(card, DOUBLE, 10**8, None, said.append)
    short, long = ([tokens for tokens, longest in tried if (longest == 8192) == is_short] for is_short in (True, False))
    assert short == [16_384, 32_768, 116_736, 73_728, 88_064]
    assert long == [88_064, 81_920]
    assert best["fits"]
    assert best["tokens"] == 81_920
    assert [one["fits"] for one in best["tried"]] == [True, True, False, True, True, False, True]
    assert len(said) == len(tried)
    assert said[2:4] == [
        "  116,736 tokens in 1 documents: too much: full",
        "  73,728 tokens in 1 documents: 1.0 s, peak 0.1 GB",
    ]


def test_the_straight_line() -> None:
    assert predicted_tokens([(1000, 3000), (2000, 4000)], 12_000) == 8192
    assert predicted_tokens([(1000, 3000), (2000, 4000)], 2000) == 2000
