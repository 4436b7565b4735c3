"""Commands, streams and exit codes. What the commands call is replaced, being tested elsewhere."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
from rich.console import Console

import slipstream
from report.test_html import report_of, run_record, step
from slipstream import cli, doctor
from slipstream.errors import InputError
from slipstream.plan import command
from slipstream.recipe import Recipe, load_recipe
from tiny import tiny_model, tiny_tokenizer


@dataclass
class Summary:
    interrupted: bool = False
    values: dict[str, Any] = field(default_factory=lambda: {"steps": 3, "loss": float("nan")})

    def to_dict(self) -> dict[str, Any]:
        return self.values


@dataclass
class FakeRun:
    """Stands for ``slipstream.run`` and ``results``: records calls, prints by every road, then raises or returns."""

    summary: Summary = field(default_factory=Summary)
    error: BaseException | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    def train(self, recipe: Recipe, *, resume: bool, console: Console) -> Summary:
        self._called(console, recipe=recipe, resume=resume)
        return self.summary

    def show_data(self, recipe: Recipe, *, rows: int, console: Console) -> dict[str, Any]:
        self._called(console, recipe=recipe, rows=rows)
        return {"rows": [[1, 2]]}

    def generate(self, run_folder: str, *, console: Console, **options: Any) -> str:
        self._called(console, run_folder=run_folder, **options)
        return "an [bold]answer[/bold] :smile:"

    def _called(self, console: Console, **arguments: Any) -> None:
        self.calls.append(arguments)
        console.print("progress of [run/1] :smile:")
        print("a library prints")
        sys.stdout.flush()
        os.write(1, b"a kernel prints\n")
        subprocess.run(["echo", "a worker prints"], check=True)
        if self.error is not None:
            raise self.error


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    fake = FakeRun()
    for module_name, functions in {"run": ("train", "show_data"), "results": ("generate",)}.items():
        module = ModuleType(f"slipstream.{module_name}")
        for name in functions:
            setattr(module, name, getattr(fake, name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(slipstream, module_name, module, raising=False)
    return fake


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: m\ndata: {train: t.jsonl}\noutput: o\n")
    return str(path)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    def slipstream_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["slipstream", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capfd.readouterr()
        return int(left.value.code or 0), out, err

    return slipstream_command


def test_train_hands_over_the_recipe_and_its_overrides(call: Any, run: FakeRun, recipe: str) -> None:
    code, out, _ = call("train", recipe, "--set", "train.steps=3", "--set", "packing.tokens=64", "--resume")
    assert code == 0
    assert "progress of [run/1] :smile:" in out  # as it is: no markup, no emoji
    (given,) = run.calls
    assert (given["recipe"].train.steps, given["recipe"].packing.tokens, given["resume"]) == (3, 64, True)


@pytest.mark.parametrize("command", ["train", "data", "generate"])
def test_json_alone_goes_to_stdout(call: Any, run: FakeRun, recipe: str, command: str) -> None:
    arguments = ["some/run", "--prompt", "hello"] if command == "generate" else [recipe]
    code, out, err = call(command, *arguments, "--json")
    assert code == 0
    assert isinstance(json.loads(out), dict)
    for line in ("progress of [run/1]", "a library prints", "a kernel prints", "a worker prints"):
        assert line in err


def test_json_has_no_nan(call: Any, run: FakeRun, recipe: str) -> None:
    _, out, _ = call("train", recipe, "--json")
    assert json.loads(out, parse_constant=pytest.fail) == {"steps": 3, "loss": None}


def test_data_shows_as_many_rows_as_asked(call: Any, run: FakeRun, recipe: str) -> None:
    code, out, _ = call("data", recipe, "--rows", "5", "--json")
    assert (code, json.loads(out), run.calls[0]["rows"]) == (0, {"rows": [[1, 2]]}, 5)


def test_generate_passes_its_options(call: Any, run: FakeRun) -> None:
    options = ["--system", "be brief", "--max-tokens", "7", "--temperature", "0.5", "--seed", "3"]
    code, out, err = call("generate", "some/run", "--prompt", "hi", *options)
    assert code == 0
    assert out.splitlines()[-1] == "an [bold]answer[/bold] :smile:"
    assert "progress" in err
    assert run.calls == [
        {
            "run_folder": "some/run",
            "prompt": "hi",
            "system": "be brief",
            "max_tokens": 7,
            "temperature": 0.5,
            "seed": 3,
        }
    ]


@pytest.mark.parametrize(("fits", "code"), [(True, 0), (False, 3)])
def test_plan_is_3_where_it_does_not_fit(
    call: Any, recipe: str, fits: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def plan(checked: Recipe, *, device: str | None, console: Console) -> tuple[dict[str, Any], bool]:
        asked.append((checked.packing.tokens, device))
        console.print("a table")
        return {"fits": fits}, fits

    monkeypatch.setattr(command, "plan", plan)
    got, out, err = call("plan", recipe, "--set", "packing.tokens=64", "--device", "h200", "--json")
    assert (got, json.loads(out), asked) == (code, {"fits": fits}, [(64, "h200")])
    assert "a table" in err
    assert call("plan", recipe)[0] == code


def test_doctor_prints_tables_or_one_document(call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = doctor.report()
    monkeypatch.setattr(doctor, "report", lambda *, fresh: report)
    code, out, _ = call("doctor")
    assert code == 0
    assert "attention varlen" in out
    code, out, err = call("doctor", "--json")
    assert (code, json.loads(out)) == (0, report)
    assert "attention varlen" in err


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_wrong_input_is_one_message_and_2(call: Any, run: FakeRun, recipe: str, json_flag: list[str]) -> None:
    run.error = InputError("row 17: [b]5,000 tokens[/b] > max_length 4,096; raise data.max_length")
    code, out, err = call("train", recipe, *json_flag)
    assert code == 2
    assert err.splitlines()[-1] == f"slipstream: {run.error}"
    assert "Traceback" not in err
    assert not json_flag or out == ""


def test_a_wrong_recipe_is_told_before_anything_starts(call: Any, run: FakeRun, recipe: str) -> None:
    code, out, err = call("train", recipe, "--set", "rank=3")
    assert (code, out, run.calls) == (2, "", [])
    assert err == f"slipstream: {recipe}: rank: unknown key; did you mean adapter.rank?\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["trian", "x"],
        ["data", "RECIPE", "--rows", "0"],
        ["generate", "x"],
        ["merge", "x"],
        ["train", "RECIPE", "--stes"],
    ],
)
def test_wrong_usage_is_2(call: Any, run: FakeRun, recipe: str, arguments: list[str]) -> None:
    code, out, err = call(*[recipe if argument == "RECIPE" else argument for argument in arguments])
    assert (code, out, run.calls) == (2, "", [])
    assert err


def test_interrupted_is_130(call: Any, run: FakeRun, recipe: str) -> None:
    run.summary = Summary(interrupted=True)
    assert call("train", recipe)[0] == 130
    code, out, _ = call("train", recipe, "--json")
    assert (code, json.loads(out)["steps"]) == (130, 3)
    run.error = KeyboardInterrupt()
    code, _, err = call("train", recipe)
    assert code == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(("rank", "waited"), [("0", []), ("1", [cli.LET_SPEAK_SECONDS])])
def test_a_bad_recipe_is_told_by_the_first_process(
    call: Any, monkeypatch: pytest.MonkeyPatch, recipe: str, rank: str, waited: list[float]
) -> None:
    """A launcher ends the others while they wait; where the first one has found nothing, they tell."""
    waits: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    monkeypatch.setenv("RANK", rank)
    code, _, err = call("train", recipe, "--set", "train.stepz=3")
    assert (code, waits) == (2, waited)
    assert "unknown key; did you mean train.steps?" in err


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, run: FakeRun, recipe: str) -> None:
    run.error = RuntimeError("a fault")
    monkeypatch.setattr(sys, "argv", ["slipstream", "train", recipe])
    with pytest.raises(RuntimeError, match="a fault"):  # the interpreter prints it and leaves with 1
        cli.main()


def test_stdout_is_back_after_a_fault(monkeypatch: pytest.MonkeyPatch, call: Any, run: FakeRun, recipe: str) -> None:
    run.error = InputError("no")
    call("train", recipe, "--json")
    run.error = None
    _, out, _ = call("train", recipe)
    assert "a kernel prints" in out


def test_a_report_is_made_again(call: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    report_of(folder, run_record(), [step(n) for n in range(1, 4)])
    (folder / "report.html").unlink()
    code, out, _ = call("report", str(folder))
    assert code == 0
    assert str(folder / "report.html") in out.replace("\n", "")
    assert "</html>" in (folder / "report.html").read_text()
    assert "incomplete" not in out
    made = {"report": str(folder / "report.html"), "incomplete": []}
    assert json.loads(call("report", str(folder), "--json")[1]) == made
    with (folder / "steps.jsonl").open("a") as lines:
        lines.write('{"step": 4, "lo')
    code, out, _ = call("report", str(folder))
    assert code == 0
    (told,) = (line for line in out.splitlines() if line.startswith("incomplete: "))
    assert "steps.jsonl" in told
    assert "4" in told
    (folder / "timeline.json").write_text("{")
    told = call("report", str(folder))[1]
    assert sum(line.startswith("incomplete: ") for line in told.splitlines()) == 2
    code, _, err = call("report", str(tmp_path))
    assert code == 2
    assert "run" in err
    assert "Traceback" not in err


def test_version_and_commands(call: Any) -> None:
    assert call("--version")[1].startswith("slipstream 0.")
    _, out, _ = call("--help")
    assert all(f"\n  {name} " in out for name in ("train", "plan", "data", "doctor", "report", "generate", "merge"))


def test_python_m_slipstream_is_the_same() -> None:
    result = subprocess.run([sys.executable, "-m", "slipstream", "trian"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "Usage: slipstream" in result.stderr


def closed_pipe(*arguments: str, **variables: str) -> tuple[int, str]:
    """Exit code and standard error of a command whose standard output nobody reads any more."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "slipstream", *arguments]
    env = {**os.environ, **variables}
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False, env=env)
    os.close(write_end)
    return result.returncode, result.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["bench", "--help"]])
def test_a_reader_that_leaves_early_is_no_traceback(arguments: list[str]) -> None:
    assert closed_pipe(*arguments) == (141, "")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_rows_may_be_read_by_head(tmp_path: Path, flags: list[str]) -> None:
    """By the consoles' road, and by that of ``--json``."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer(eos="</s>").save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(20)))
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {tmp_path / 'model'}\noutput: o\ndata: {{train: {tmp_path / 'rows.jsonl'}}}\n")
    caches = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "XDG_CACHE_HOME": str(tmp_path / "caches")}
    code, err = closed_pipe("data", str(path), *flags, **caches)
    assert code == 141
    assert "Traceback" not in err
    assert "Broken" not in err
    assert flags or err == ""


def test_a_plan_of_cached_rows_starts_without_what_only_training_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes about a second to import."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer(eos="</s>").save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(20)))
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {tmp_path / 'model'}\noutput: o\ndata: {{train: {tmp_path / 'rows.jsonl'}}}\n")
    env = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "XDG_CACHE_HOME": str(tmp_path / "caches")}
    code = (
        "import sys; from slipstream.cli import app\n"
        f"try: app(['plan', {str(path)!r}, '--device', 'h200'])\n"
        "except SystemExit as left: assert left.code in (0, 3), left.code\n"
        "print('IMPORTED', *sorted({'datasets', 'pandas', 'peft'} & set(sys.modules)))"
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    command.plan(load_recipe(path), device="h200", console=Console(quiet=True))  # tokenises
    cached = [entry for entry in (tmp_path / "cache").rglob("*") if entry.is_file()]
    assert cached
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert [entry for entry in (tmp_path / "cache").rglob("*") if entry.is_file()] == cached
    assert done.stdout.splitlines()[-1] == "IMPORTED"
