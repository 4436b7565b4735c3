"""``accelerate launch``: two processes on the CPU learn as one, and its settings change nothing or are refused."""

import io
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from rich.console import Console
from safetensors.torch import load_file

import slipstream.run
from ranked import ROWS, recipe_in, write_inputs
from slipstream import InputError
from slipstream.train.arguments import training_arguments
from slipstream.train.launcher import COMPILER, ENGINES, MPI_COUNTS, ON_CPU, PRECISION, check_launcher
from slipstream.train.options import TrainOptions
from slipstream.train.ranks import Ranks
from slipstream.train.records import read_records

SHORT = {"data__eval": None, "train__eval_every": None, "train__save_every": None, "train__epochs": 1}
LAUNCH = (
    "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0 "
    "--mixed_precision no --dynamo_backend no -m slipstream train"
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", PRECISION, COMPILER, ON_CPU, *ENGINES, *MPI_COUNTS):
        monkeypatch.delenv(name, raising=False)


def test_two_launched_processes_learn_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreported: None) -> None:
    """The command as the README has it, on processors; the same rows are learned from, in as many steps."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_inputs(tmp_path)
    changes = [f"--set={key.replace('__', '.')}={'null' if value is None else value}" for key, value in SHORT.items()]
    recipe_in(tmp_path, "launched")
    launched = subprocess.run(
        [sys.executable, "-m", *LAUNCH.split(), str(tmp_path / "recipe.yaml"), *changes],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_DATASETS_CACHE": str(tmp_path / "cache"),
            "XDG_CACHE_HOME": str(tmp_path / "caches"),
        },
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert launched.returncode == 0, launched.stderr
    assert "2 processes, each with all weights" in launched.stdout
    assert "adapter saved in" in launched.stdout
    lines = launched.stdout.splitlines()
    assert len(set(lines)) == len(lines)  # one of them speaks
    alone = recipe_in(tmp_path, "alone", train__accumulate=2, **SHORT)
    slipstream.run.train(alone, resume=False, console=Console(file=io.StringIO()))
    there, here = (read_records(tmp_path / "runs" / name) for name in ("launched", "alone"))
    assert (there.run["processes"], here.run["processes"]) == (2, 1)
    assert len(there.steps) == len(here.steps) == (ROWS + 1) // 2
    assert [step.learned_tokens for step in there.steps] == [step.learned_tokens for step in here.steps]
    assert [step.loss for step in there.steps] == pytest.approx([step.loss for step in here.steps], rel=1e-6)
    found, expected = (
        load_file(tmp_path / "runs" / name / "adapter/adapter_model.safetensors") for name in ("launched", "alone")
    )
    assert found.keys() == expected.keys()
    assert all(float((found[name] - value).abs().max()) < 1e-6 for name, value in expected.items())
    assert max(float(value.abs().max()) for value in expected.values()) > 0.01


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        (PRECISION, "fp16", r"mixed precision \(ACCELERATE_MIXED_PRECISION=fp16\), .* float32 here: give --mixed_pre"),
        (PRECISION, "bf16", r"mixed precision \(ACCELERATE_MIXED_PRECISION=bf16\), .* float32 here: give --mixed_pre"),
        (PRECISION, "fp8", r"mixed precision \(ACCELERATE_MIXED_PRECISION=fp8\)"),
        (COMPILER, "INDUCTOR", r"compilation \(ACCELERATE_DYNAMO_BACKEND=INDUCTOR\).*--dynamo_backend no.*train.mode"),
        (ON_CPU, "True", r"the CPU \(ACCELERATE_USE_CPU=True\), .*leave --cpu out.*CUDA_VISIBLE_DEVICES="),
        *((name, "true", rf"{what} \({name}=true\), .*--multi_gpu.*sharding: fsdp2") for name, what in ENGINES.items()),
    ],
)
def test_settings_that_the_recipe_decides_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    check_launcher("float32", has_card=True)
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"^accelerate's configuration asks for {told}"):
        check_launcher("float32", has_card=True)


def test_all_refused_settings_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRECISION, "fp16")
    monkeypatch.setenv(COMPILER, "INDUCTOR")
    with pytest.raises(InputError, match=r"PRECISION=fp16.*; and for compilation"):
        check_launcher("bfloat16", has_card=True)


def test_settings_that_change_nothing_are_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What accelerate sets by default, and the precision that is computed in anyhow, by our own casts."""
    for name in ENGINES:
        monkeypatch.setenv(name, "false")
    for name, value in ((PRECISION, "bf16"), (COMPILER, "NO"), (ON_CPU, "False")):
        monkeypatch.setenv(name, value)
    check_launcher("bfloat16", has_card=True)
    arguments = training_arguments(TrainOptions(), tmp_path, rows=1, has_eval=False, cpu=True)
    assert arguments.mixed_precision == "no"
    monkeypatch.setenv(PRECISION, "no")
    monkeypatch.setenv(ON_CPU, "True")
    check_launcher("bfloat16", has_card=False)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_of_one_process_refuses_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setenv(engine, "true")
    recipe = recipe_in(tmp_path, "refused")
    with pytest.raises(InputError, match=f"asks for {ENGINES[engine]}"):
        slipstream.run.train(recipe, resume=False, console=Console(file=io.StringIO()))
    assert not Path(recipe.output).exists()


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {PRECISION: "no", "MASTER_ADDR": "127.0.0.1"},
            "accelerate launch was asked for several processes .*--multi_g",
        ),
        *(({name: "2"}, f"{name} is 2 in the environment, so mpirun or srun .*torchrun") for name in MPI_COUNTS),
    ],
)
def test_processes_that_know_of_no_others_are_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], told: str
) -> None:
    """``accelerate launch --cpu --num_processes 2`` starts one process; each of mpirun's would train by itself."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=told), Ranks.joined():
        pass


@pytest.mark.parametrize("environment", [{PRECISION: "no"}, {"MASTER_ADDR": "node-7"}, dict.fromkeys(MPI_COUNTS, "1")])
def test_one_process_of_a_launcher_trains_alone(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Ranks.joined() as ranks:
        assert ranks.count == 1
