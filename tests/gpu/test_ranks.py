"""Two processes on two cards learn what one process learns from as many batches (NCCL; run with -m gpu)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ranked import STEPS, write_inputs
from slipstream.train.records import Records, read_records

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
NEAR = 0.02
"""Relative: layers compute in bf16, and sums come in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    write_inputs(made)
    return made


def trained(folder: Path, name: str, processes: int, **train: Any) -> Records:
    kind = train.pop("kind")
    recipe = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl")},
        "adapter": {"kind": kind, "rank": 4} if kind == "lora" else {"kind": kind},
        "packing": {"tokens": 72},
        "train": {"epochs": 2, "learning_rate": 0.01 if kind == "lora" else 0.001, **train},
        "output": str(folder / name),
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(recipe))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launcher, "-m", "slipstream", "train", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_records(folder / name)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Records]:
    kinds = {"lora": "lora", "full": "none"}
    return {
        name: trained(folder, f"alone-{name}", 1, kind=kind, mode="eager", accumulate=2) for name, kind in kinds.items()
    }


@pytest.mark.parametrize(
    ("what", "mode", "sharding", "told"),
    [
        ("lora", "captured", "none", "captured, as asked for"),
        ("lora", "compiled", "none", "compiled, as asked for"),
        ("lora", "eager", "fsdp2", "each divided over 2 ranks"),
        ("full", "eager", "none", "2 processes, each with all weights"),
        ("full", "eager", "fsdp2", "each divided over 2 ranks"),
    ],
)
def test_two_cards_learn_what_one_learns(
    folder: Path, alone: dict[str, Records], what: str, mode: str, sharding: str, told: str
) -> None:
    kind = "lora" if what == "lora" else "none"
    found = trained(folder, f"{what}-{mode}-{sharding}", 2, kind=kind, mode=mode, sharding=sharding)
    assert any(told in decision["reason"] for decision in found.run["decisions"]), found.run["decisions"]
    expected = alone[what]
    assert len(found.steps) == len(expected.steps) == STEPS
    assert [step.learned_tokens for step in found.steps] == [step.learned_tokens for step in expected.steps]
    assert [step.loss for step in found.steps] == pytest.approx([step.loss for step in expected.steps], rel=NEAR)
    assert expected.steps[0].loss - expected.steps[-1].loss > 2 * NEAR * expected.steps[0].loss  # it did learn
    norms = [step.grad_norm for step in expected.steps]
    assert [step.grad_norm for step in found.steps] == pytest.approx(norms, rel=5 * NEAR)
    assert found.evals[-1].loss == pytest.approx(expected.evals[-1].loss, rel=NEAR)
