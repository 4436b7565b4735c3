"""What a captured step does around its graph; the graph itself is tested on a card (``tests/gpu``)."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from packed import documents, row_of
from slipstream.step.captured import CapturedStep


def test_only_recordings_need_the_layers_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay puts nothing in place on the host: that would be paid in every step."""
    entered: list[str] = []

    @contextmanager
    def layers() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    def capture(static: object) -> SimpleNamespace:
        assert entered == ["in", "warm"]
        graph = SimpleNamespace(replay=lambda: None)
        return SimpleNamespace(batch=static, graph=graph, loss=torch.zeros(()), addresses=step._addresses())

    step = CapturedStep(lambda batch: torch.zeros(()), [nn.Parameter(torch.ones(2))], recording=layers)
    monkeypatch.setattr(step, "_warm_up", lambda static: entered.append("warm"))
    monkeypatch.setattr(step, "_capture", capture)
    batch = row_of(documents())
    for _ in range(3):
        step(batch, 7.0)
    assert step.recordings == 1
    assert entered == ["in", "warm", "out"]
