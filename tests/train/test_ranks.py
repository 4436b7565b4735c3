"""Several ranks learn what one process learns from as many batches (``ranked.py`` runs them)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ranked import EPOCHS, ROWS, STEPS, TIED
from slipstream.train.checkpoint import is_whole
from slipstream.train.records import Records, StepRecord, read_records

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranked")
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    with (folder / "stderr").open("w") as stderr:
        subprocess.run(
            [sys.executable, str(TESTS / "ranked.py"), str(folder)],
            check=True,
            timeout=280,
            stderr=stderr,
            env={
                **os.environ,
                "PYTHONPATH": paths,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_CACHE": str(folder / "cache"),
            },
        )
    return folder


def told(ranked: Path, name: str) -> Any:
    return json.loads((ranked / "told.json").read_text())[name]


def log(ranked: Path, name: str, rank: int = 0) -> str:
    return (ranked / f"{name}.{rank}.log").read_text()


def records(ranked: Path, name: str) -> Records:
    return read_records(ranked / "runs" / name)


def weights(ranked: Path, name: str, file: str = "adapter/adapter_model.safetensors") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(ranked / "runs" / name / file)
    return found


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], near: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=near, msg=name)


def counts(step: StepRecord) -> tuple[int, ...]:
    return step.tokens, step.learned_tokens, step.documents


@pytest.mark.parametrize(
    ("several", "one", "near"), [("two", "one", 1e-6), ("three", "alone", 5e-6), ("exchanged", "exchanged alone", 1e-6)]
)
def test_ranks_learn_what_one_process_learns(ranked: Path, several: str, one: str, near: float) -> None:
    """transformers#34191: the loss is token-weighted over ranks as over accumulated batches (summed in another order,
    where there are three).
    """
    assert told(ranked, several) == [[0] * (3 if several == "three" else 2)], log(ranked, several)
    there, here = records(ranked, several), records(ranked, one)
    assert there.run["processes"] > here.run["processes"] == 1
    assert len(there.steps) == len(here.steps) == {"two": STEPS, "three": 3, "exchanged": 8}[several]
    assert [counts(step) for step in there.steps] == [counts(step) for step in here.steps]
    assert len({step.learned_tokens for step in here.steps}) > 2  # a mean of means would differ
    assert [step.loss for step in there.steps] == pytest.approx([step.loss for step in here.steps], rel=1e-6)
    assert [step.grad_norm for step in there.steps] == pytest.approx([step.grad_norm for step in here.steps], rel=1e-5)
    assert [item.loss for item in there.evals] == pytest.approx([item.loss for item in here.evals], rel=1e-6)
    assert [item.learned_tokens for item in there.evals] == [item.learned_tokens for item in here.evals]
    assert max(float(value.abs().max()) for value in weights(ranked, one).values()) > 0.01
    assert_near(weights(ranked, several), weights(ranked, one), near)


def test_every_document_is_learned_from_once_an_epoch(ranked: Path) -> None:
    run = records(ranked, "two")
    assert ROWS % 2  # so one rank has a batch less
    assert sum(step.documents for step in run.steps) == EPOCHS * ROWS
    assert sum(step.learned_tokens for step in run.steps) == EPOCHS * run.run["data"]["train"]["tokens_learned"]
    last = run.steps[STEPS // EPOCHS - 1]
    assert last.documents == 1
    assert last.padding_tokens > 72  # a row of nothing


def test_one_rank_tokenises_for_all(ranked: Path) -> None:
    assert len((ranked / "rendered.0").read_text().splitlines()) == ROWS + 3
    assert not (ranked / "rendered.1").exists()


def test_one_rank_speaks(ranked: Path) -> None:
    assert "adapter saved in" in log(ranked, "two")
    assert log(ranked, "two", 1) == ""


@pytest.mark.parametrize(("name", "first", "step"), [("killed", -9, 9), ("asked", 130, 10)])
def test_they_go_on_to_the_same_adapter(ranked: Path, name: str, first: int, step: int) -> None:
    """One rank is killed outright, or alone gets the signal, in the second epoch."""
    before, after = told(ranked, name)
    assert (before[1], after) == (first, [0, 0]), log(ranked, name)
    assert before[0] in ((1, -9) if first == -9 else (130,))  # what the other meets first: a lost peer, or the launcher
    assert f"going on from step {step} " in log(ranked, name)
    assert step > STEPS // EPOCHS
    whole = weights(ranked, "never")
    assert_near(weights(ranked, name), whole, 0)
    assert not all(torch.equal(whole[key], value) for key, value in weights(ranked, "two").items())  # dropout was on
    assert [step.step for step in records(ranked, name).steps] == list(range(1, STEPS + 1))


def test_a_signal_to_one_rank_stops_all_after_the_same_step(ranked: Path) -> None:
    assert told(ranked, "asked after") == list(range(1, 11))  # it came in step 9, and was known to all a step later
    assert "interrupted and saved after step 10" in log(ranked, "asked")


def test_divided_weights_learn_the_same(ranked: Path) -> None:
    """Low-rank adapters."""
    assert told(ranked, "divided") == [[0, 0]], log(ranked, "divided")
    assert "sharding: on (2 layers, each divided over 2 ranks and gathered in float32" in log(ranked, "divided")
    assert_near(weights(ranked, "divided"), weights(ranked, "never"), 1e-6)


def test_divided_weights_in_half_precision(ranked: Path) -> None:
    """A copied `Segments` would have no bounds made: FSDP's casting of inputs copies what it finds."""
    run, alone = (read_records(ranked / "runs" / name) for name in ("divided half", "alone half"))
    assert any("gathered in bfloat16" in decision["reason"] for decision in run.run["decisions"])
    assert [step.learned_tokens for step in run.steps] == [step.learned_tokens for step in alone.steps]
    assert [step.loss for step in run.steps] == pytest.approx([step.loss for step in alone.steps], rel=2e-3)
    assert run.steps[-1].loss < run.steps[0].loss


def test_divided_weights_are_trained_whole(ranked: Path) -> None:
    """All weights, gradients kept back over two batches a step; killed in the second epoch, and resumed."""
    before, after = told(ranked, "full")
    assert (before[0], after) == (-9, [0, 0]), log(ranked, "full")
    assert "going on from step 6 " in log(ranked, "full")
    there, here = records(ranked, "full"), records(ranked, "full alone")
    assert [step.step for step in there.steps] == list(range(1, 9))
    assert [step.grad_norm for step in there.steps] == pytest.approx([step.grad_norm for step in here.steps], rel=1e-5)
    file = "model/model.safetensors"
    assert_near(weights(ranked, "full", file), weights(ranked, "full alone", file), 1e-6)
    assert json.loads((ranked / "runs/full/model/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("name", TIED)
def test_divided_weights_that_are_tied(ranked: Path, name: str) -> None:
    """The embedding is the head's own tensor; what is trained is saved whole, and gone on with."""
    statuses = told(ranked, name)
    assert statuses[-1] == [0, 0], log(ranked, name)
    if name != "tied":
        assert statuses[0][0] == -9
        assert "going on from step 3 " in log(ranked, name)
    assert "each divided over 2 ranks" in log(ranked, name)
    file = "model/model.safetensors" if name == "tied full" else "adapter/adapter_model.safetensors"
    there, here = weights(ranked, name, file), weights(ranked, f"{name} alone", file)
    assert_near(there, here, 1e-6)
    trained = {"tied whole": "embed_tokens.weight", "tied tokens": "trainable_tokens_delta"}.get(name, "proj")
    assert any(trained in key and float(value.abs().max()) > 0.01 for key, value in there.items())
    assert not any("lm_head" in key for key in there)


@pytest.mark.parametrize("name", [name for name in TIED if name != "tied full"])
def test_plain_peft_loads_them(ranked: Path, name: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(ranked / "tied")
    assert base.get_input_embeddings().weight is base.get_output_embeddings().weight
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(base, ranked / "runs" / name / "adapter"))
    assert_near(loaded, weights(ranked, name), 0)


def test_checkpoints_hold_every_ranks_random_state(ranked: Path) -> None:
    found = sorted((ranked / "runs/two/checkpoints").iterdir())
    assert found
    for checkpoint in found:
        assert is_whole(checkpoint)
        listed = json.loads((checkpoint / "slipstream.json").read_text())["files"]
        assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= listed.keys()


def test_a_folder_that_not_all_see_is_refused(ranked: Path) -> None:
    """Two machines without a shared disk, or, as here, a relative output from two folders; anew and on resuming."""
    assert told(ranked, "apart") == [[2, 2], [2, 2]]
    lines = log(ranked, "apart").splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "'apart' is not one folder for all processes: what process 0 writes to" in line
        assert f"is not there for process 1 of 2, which looks in '{ranked / 'there/apart'}' on " in line
        assert line.endswith("or start all processes in the same folder")
    assert log(ranked, "apart", 1) == ""
    assert [file.name for file in (ranked / "here/apart").iterdir()] == ["run.json"]  # which the test has put there
    assert not list((ranked / "there").iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "others",
            "the recipe differs between processes 0 and 1 of 2: adapter.rank is 4 and 5, train.seed is 0 and 1; start "
            "all processes with the same recipe",
        ),
        ("rows", "the tokenised data differs between processes 0 and 1 of 2; give all processes the same files"),
        ("weights", "the base model differs between processes 0 and 1 of 2; give all processes the same weights"),
        ("bad", "rows longer than max_length 20"),
        ("fewer", "began as 2 processes and would go on as 1"),
    ],
)
def test_what_is_wrong_is_told_once(ranked: Path, name: str, message: str) -> None:
    statuses = told(ranked, name)[0]
    assert set(statuses) == {2}
    assert message in log(ranked, name)
    assert [log(ranked, name, rank) for rank in range(1, len(statuses))] == [""] * (len(statuses) - 1)
