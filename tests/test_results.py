"""``merge`` from the command line, and ``generate``: a run trained here becomes a model that transformers loads."""

import contextlib
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream import cli, results
from slipstream.errors import InputError
from slipstream.model.load import LoadOptions, load_model
from slipstream.recipe import load_recipe
from slipstream.run import train
from slipstream.train.interrupt import StopRequest
from tiny import CHATML, tiny_model, tiny_tokenizer
from tiny_gguf import write_gguf

Command = Callable[..., tuple[int, str, str]]
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
(README_RESIZES,) = re.findall(r"`(base\.resize_token_embeddings\(.*?\))`", README)
pytestmark = pytest.mark.usefixtures("unreported")


@pytest.fixture
def merge(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["slipstream", "merge", *map(str, arguments)])
        code: Any = 0
        capfd.readouterr()
        try:
            cli.main()
        except SystemExit as left:
            code = left.code
        out, err = capfd.readouterr()
        return int(code or 0), out, err

    return command


def base_of(folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    tiny_model(**overrides).to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def run_of(folder: Path, base: Path, *overrides: str, rows: list[dict[str, str]] | None = None) -> Path:
    """A run of two steps in ``folder/run``."""
    file = folder / "rows.jsonl"
    pairs = rows or [{"prompt": f"{i} + {i}", "completion": str(2 * i)} for i in range(40)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    path = folder / "recipe.yaml"
    path.write_text(f"model: {base}\ndata: {{train: {file}}}\noutput: {folder / 'run'}\n")
    short = ["train.steps=2", "packing.tokens=256", "train.learning_rate=0.05", "load.dtype=float32"]
    train(load_recipe(path, [*short, *overrides]), resume=False, console=Console(file=io.StringIO()))
    return folder / "run"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(60)[None]).logits


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def by_its_card(adapter: Path) -> Any:
    """The model that the lines of an adapter's card load, run in its folder."""
    (lines,) = re.findall(r"```python\n(.*?)```", (adapter / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with contextlib.chdir(adapter):
        exec(lines, names)
    assert isinstance(names["model"], PeftModel)
    return names["model"].eval()


@pytest.mark.parametrize(
    "overrides",
    [[], ["adapter.rslora=true", "adapter.modules_to_save=[lm_head]"], ["adapter.kind=none"]],
    ids=["lora", "rslora and head", "full"],
)
def test_a_run_becomes_a_model(overrides: list[str], tmp_path: Path, merge: Command) -> None:
    base = base_of(tmp_path / "base", tie_word_embeddings=True)
    run, out = run_of(tmp_path, base, *overrides), tmp_path / "merged" / "model"
    code, printed, err = merge(run, "--out", out, "--json")
    assert code == 0, err
    full = overrides == ["adapter.kind=none"]
    source = run / ("model" if full else "adapter")
    expected = logits(plain(source) if full else PeftModel.from_pretrained(plain(base), source))
    merged = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    assert (expected - logits(plain(base))).abs().max() > 0.01  # something was learned
    assert AutoTokenizer.from_pretrained(out).chat_template == CHATML
    assert (out / "generation_config.json").is_file()
    assert json.loads(printed) == {
        "out": str(out),
        "source": str(source),
        "base": str(base),
        "finished": True,
        "dtype": "float32",
        "parameters": sum(parameter.numel() for parameter in merged.parameters()),
        "weight_bytes": sum(t.numel() * t.element_size() for t in load_file(out / "model.safetensors").values()),
    }


@pytest.mark.parametrize("kind", ["lora", "none"])
def test_the_dtype_is_the_bases_unless_said(kind: str, tmp_path: Path, merge: Command) -> None:
    base = base_of(tmp_path / "base", torch.bfloat16)
    run = run_of(tmp_path, base, f"adapter.kind={kind}")
    code, printed, err = merge(run, "--out", tmp_path / "as-base")
    assert code == 0, err
    assert "parameters in bfloat16 saved in" in printed
    assert merge(run, "--out", tmp_path / "said", "--dtype", "float32")[0] == 0
    as_base, said = load_file(tmp_path / "as-base/model.safetensors"), load_file(tmp_path / "said/model.safetensors")
    assert {tensor.dtype for tensor in said.values()} == {torch.float32}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "as-base").dtype == torch.bfloat16
    assert all(torch.equal(as_base[name], said[name].bfloat16()) for name in said)  # rounded once
    assert any(not torch.equal(as_base[name].float(), said[name]) for name in said)


@pytest.mark.parametrize("adapter", ["rows", "whole", "none"])
def test_a_run_with_new_tokens(adapter: str, tmp_path: Path, merge: Command) -> None:
    base = base_of(tmp_path / "base", vocab_size=275)  # not a row to spare
    changes = {
        "rows": [],
        "whole": ["adapter.modules_to_save=[embed_tokens,lm_head]"],
        "none": ["adapter.kind=none"],
    }
    rows = [{"prompt": f"<sum>{i} + {i}</sum>", "completion": f"<answer>{2 * i}"} for i in range(40)]
    tokens = "load.new_tokens=[<sum>, </sum>, <answer>]"
    run, out = run_of(tmp_path, base, tokens, *changes[adapter], rows=rows), tmp_path / "out"
    code, _, err = merge(run, "--out", out, "--json")
    assert code == 0, err
    told = {one["name"]: one["reason"] for one in json.loads((run / "run.json").read_text())["decisions"]}
    assert told["new tokens"] == "3 tokens added to the vocabulary"
    source = run / ("model" if adapter == "none" else "adapter")
    for folder in (source, out):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.encode("<sum>1</sum>") == [275, tokenizer.encode("1")[0], 276]
    ids = torch.tensor([[5, 275, 9, 276, 277]])
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(out)(input_ids=ids).logits
        if adapter == "none":
            expected = plain(source)(input_ids=ids).logits
        else:
            expected = by_its_card(source)(input_ids=ids).logits
            resized = plain(base)
            eval(README_RESIZES, {"base": resized, "tokenizer": AutoTokenizer.from_pretrained(source)})
            by_readme = PeftModel.from_pretrained(resized, source)(input_ids=ids).logits
            torch.testing.assert_close(by_readme[..., :278], expected[..., :278], rtol=0, atol=1e-5)
            assert resized.get_input_embeddings().weight.shape[0] == 280
    kept = slice(278)  # of the rows beyond, which stand for no token, plain peft's base has random ones
    torch.testing.assert_close(merged[..., kept], expected[..., kept], rtol=0, atol=1e-5)
    said = results.generate(
        str(run),
        prompt="<sum>1",
        system=None,
        max_tokens=2,
        temperature=0.0,
        seed=0,
        console=Console(file=io.StringIO()),
    )
    assert isinstance(said, str)


@pytest.fixture
def _four_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bits on the CPU, which a run refuses: bitsandbytes can, if slowly."""
    pytest.importorskip("bitsandbytes", reason="needs the extra nf4")
    monkeypatch.setattr("slipstream.prepare.check_quantize", lambda *_, **__: None)


@pytest.mark.usefixtures("_four_bits")
def test_four_bits_merge_into_the_weights_they_stand_for(tmp_path: Path, merge: Command) -> None:
    base = base_of(tmp_path / "base", torch.bfloat16)
    run, out = run_of(tmp_path, base, "load.quantize=nf4"), tmp_path / "out"
    assert any(decision["name"] == "nf4" for decision in json.loads((run / "run.json").read_text())["decisions"])
    code, printed, err = merge(run, "--out", out, "--dtype", "float32", "--json")
    assert code == 0, err
    trained_on = load_model(str(base), LoadOptions(quantize="nf4", dtype="float32"))
    before = logits(trained_on)
    expected = logits(PeftModel.from_pretrained(trained_on, run / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(out))
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-5)
    assert (expected - before).abs().max() > 0.01  # something was learned
    other = logits(PeftModel.from_pretrained(plain(base), run / "adapter"))
    assert (merged - other).abs().max() > 1e-3  # the original weights would give others
    assert json.loads(printed)["parameters"] == sum(parameter.numel() for parameter in plain(base).parameters())
    assert merge(run, "--out", tmp_path / "as-base")[0] == 0
    as_base, exact = load_file(tmp_path / "as-base/model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(as_base[name], exact[name].bfloat16()) for name in exact)  # rounded once


@pytest.mark.usefixtures("_four_bits")
def test_a_checkpoint_that_is_four_bit_itself_merges_too(tmp_path: Path, merge: Command) -> None:
    made = load_model(str(base_of(tmp_path / "plain")), LoadOptions(quantize="nf4", dtype="float32"))
    made.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    run, out = run_of(tmp_path, tmp_path / "base"), tmp_path / "out"
    code, _, err = merge(run, "--out", out, "--dtype", "float32")
    assert code == 0, err
    expected = logits(PeftModel.from_pretrained(made, run / "adapter"))
    torch.testing.assert_close(logits(plain(out)), expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("_four_bits")
def test_four_bits_of_another_base(tmp_path: Path, merge: Command) -> None:
    run = run_of(tmp_path, base_of(tmp_path / "base"), "load.quantize=nf4")
    shutil.rmtree(tmp_path / "base")
    base_of(tmp_path / "base", num_hidden_layers=3)
    message = refused(merge(run, "--out", tmp_path / "out", "--json"))
    assert "adapter was trained on a model of" in message


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("load.quantize=nf4", "load.quantize: nf4 needs bitsandbytes, which is not installed"),
        ("train.optimizer=adamw8bit", "train.optimizer: adamw8bit needs bitsandbytes"),
    ],
)
def test_without_bitsandbytes_nothing_is_loaded(
    override: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.model.quantize.find_spec", lambda _: None)
    monkeypatch.setattr("slipstream.train.options.find_spec", lambda _: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(InputError, match=told):
        run_of(tmp_path, tmp_path / "no-such-base", override)
    assert not (tmp_path / "run").exists()


def test_all_weights_in_bf16_have_masters(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", torch.bfloat16)
    small = ["train.learning_rate=1.0e-5", "train.save_every=1", "train.warmup=0"]
    run = run_of(tmp_path, base, "adapter.kind=none", "load.dtype=bfloat16", *small)
    checkpoint = run / "checkpoints" / "checkpoint-2"
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    masters = [value["master"] for value in state.values()]
    saved, before = load_file(run / "model" / "model.safetensors"), load_file(base / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert len(masters) == len(saved)
    assert {master.dtype for master in masters} == {torch.float32}
    assert sorted(m.bfloat16().float().sum().item() for m in masters) == sorted(
        t.float().sum().item() for t in saved.values()
    )
    moved = sum(int((saved[name] != before[name]).sum()) for name in saved)
    exact = sum(int((master != master.bfloat16().float()).sum()) for master in masters)
    assert moved < exact / 4  # most updates are too small for bf16, and are kept


def test_a_gguf_base(tmp_path: Path, merge: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf")
    run, out = run_of(tmp_path, file), tmp_path / "out"
    code, printed, err = merge(run, "--out", out)
    assert code == 0, err
    assert "in float32 saved" in printed  # as it was trained
    assert "`AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)`" in README
    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    with pytest.raises(OSError, match=r"tiny\.gguf"):
        AutoPeftModelForCausalLM.from_pretrained(run / "adapter")
    before = logits(direct)
    expected = logits(PeftModel.from_pretrained(direct, run / "adapter"))
    torch.testing.assert_close(logits(by_its_card(run / "adapter")), expected, rtol=0, atol=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    assert (expected - before).abs().max() > 0.01
    assert "quantization_config" not in (out / "config.json").read_text()
    assert AutoTokenizer.from_pretrained(out).chat_template == CHATML


def test_an_interrupted_run_gives_its_last_checkpoint(
    tmp_path: Path, merge: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_after_the_second(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            self.signal = 15
            control.should_save = control.should_training_stop = True

    monkeypatch.setattr(StopRequest, "on_step_end", stop_after_the_second)
    base = base_of(tmp_path / "base")
    run, out = run_of(tmp_path, base, "train.steps=9", "train.save_every=1", "train.epochs=9"), tmp_path / "out"
    assert not (run / "adapter").exists()
    code, printed, err = merge(run, "--out", out, "--json")
    assert code == 0, err
    checkpoint = run / "checkpoints" / "checkpoint-2"
    assert f"the run isn't finished: using {checkpoint}" in err
    assert (json.loads(printed)["finished"], json.loads(printed)["source"]) == (False, str(checkpoint))
    expected = logits(PeftModel.from_pretrained(plain(base), checkpoint))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(out)), expected, rtol=0, atol=1e-5)


def test_generate_answers_with_the_tuned_model(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def answer(model: Any, tokenizer: Any, prompt: str, **options: Any) -> str:
        seen.update(options, logits=logits(model), chat_template=tokenizer.chat_template)
        return prompt[::-1]

    monkeypatch.setattr(results, "generate_text", answer)
    options: dict[str, Any] = {"system": "s", "max_tokens": 3, "temperature": 0.5, "seed": 7}
    console = Console(file=io.StringIO())
    assert results.generate(str(finished / "run"), prompt="abc", console=console, **options) == "cba"
    expected = logits(PeftModel.from_pretrained(plain(finished / "base"), finished / "run" / "adapter"))
    torch.testing.assert_close(seen.pop("logits"), expected)
    assert seen == {**options, "chat_template": CHATML}


# Bad input


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``base`` and the finished ``run``; tests change copies."""
    folder = tmp_path_factory.mktemp("finished")
    run_of(folder, base_of(folder / "base"))
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A run whose base lies beside it, both to be changed at will."""
    shutil.copytree(finished / "base", tmp_path / "base")
    shutil.copytree(finished / "run", tmp_path / "run")
    for name in ("run.json", "adapter/adapter_config.json"):
        record = (tmp_path / "run" / name).read_text()
        assert str(finished / "base") in record
        (tmp_path / "run" / name).write_text(record.replace(str(finished / "base"), str(tmp_path / "base")))
    return tmp_path / "run"


def refused(answer: tuple[int, str, str]) -> str:
    """The one message of a refusal."""
    code, out, err = answer
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    return err.splitlines()[-1]


def test_no_run(merge: Command, tmp_path: Path) -> None:
    assert "is not a folder; give the output folder of a run" in refused(
        merge(tmp_path / "none", "--out", tmp_path / "out", "--json")
    )
    assert "is not a run (it has no run.json)" in refused(merge(tmp_path, "--out", tmp_path / "out", "--json"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": 2, "slipstream": "9.1"}, "run.json has format 2; this version reads format 1; use the version"),
        ({"format": None}, "run.json has format unknown; this version reads format 1"),
        ({"recipe": None}, "run.json lacks recipe.model; use the version of Slipstream that wrote it"),
        ({"recipe": "damaged"}, "run.json lacks recipe.model; use the version of Slipstream that wrote it"),
    ],
    ids=["newer", "unknown", "without its recipe", "with another"],
)
def test_a_run_of_another_format(changes: dict[str, Any], told: str, run: Path, merge: Command, tmp_path: Path) -> None:
    record = json.loads((run / "run.json").read_text()) | changes
    (run / "run.json").write_text(json.dumps({name: value for name, value in record.items() if value is not None}))
    assert told in refused(merge(run, "--out", tmp_path / "out", "--json"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError) as caught:
        results.generate(
            str(run),
            prompt="1",
            system=None,
            max_tokens=1,
            temperature=0.0,
            seed=0,
            console=Console(file=io.StringIO()),
        )
    assert told in str(caught.value)
    assert f"({record['slipstream']})" in str(caught.value)


def test_out_is_not_empty(run: Path, merge: Command, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in (run / "adapter").iterdir()}
    message = refused(merge(run, "--out", run / "adapter", "--json"))
    assert "is not empty ('README.md' and" in message
    assert "choose another --out, or empty it" in message
    assert {path: path.read_bytes() for path in (run / "adapter").iterdir()} == before


@pytest.mark.parametrize(("kind", "result"), [("lora", "adapter"), ("none", "model")])
def test_nothing_tuned_yet(kind: str, result: str, run: Path, merge: Command, tmp_path: Path) -> None:
    shutil.rmtree(run / "adapter")
    shutil.rmtree(run / "checkpoints")
    record = json.loads((run / "run.json").read_text())
    record["recipe"]["adapter"]["kind"] = kind
    (run / "run.json").write_text(json.dumps(record))
    message = refused(merge(run, "--out", tmp_path / "out", "--json"))
    assert f"has no {result} yet, and no whole checkpoint" in message
    assert "train.save_every" in message
    assert not (tmp_path / "out").exists()


def test_the_base_is_gone(run: Path, merge: Command, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "base")
    message = refused(merge(run, "--out", tmp_path / "out", "--dtype", "float32", "--json"))
    told = f"the run's base model {tmp_path / 'base'} does not exist any more; put it back, or set a link to it there"
    assert message == f"slipstream: {told}"
    with pytest.raises(InputError, match=told):
        answer_of(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_full_run_needs_its_base_for_the_dtype_alone(tmp_path: Path, merge: Command) -> None:
    run, out = run_of(tmp_path, base_of(tmp_path / "base"), "adapter.kind=none"), tmp_path / "out"
    shutil.rmtree(tmp_path / "base")
    assert refused(merge(run, "--out", out, "--json")).endswith(
        "put it back, set a link to it there, or give the merged model's --dtype"
    )
    assert merge(run, "--out", out, "--dtype", "float16")[0] == 0
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float16


def answer_of(run: Path) -> str:
    quiet = Console(file=io.StringIO())
    return results.generate(str(run), prompt="1 + 1", system=None, max_tokens=2, temperature=0.0, seed=0, console=quiet)


def test_a_merged_model_is_tried_too(
    run: Path, merge: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert merge(run, "--out", tmp_path / "out")[0] == 0
    tried: list[torch.Tensor] = []

    def answer(model: Any, tokenizer: Any, prompt: str, **_: Any) -> str:
        tried.append(logits(model))
        return f"{tokenizer.chat_template == CHATML}"

    monkeypatch.setattr(results, "generate_text", answer)
    assert answer_of(run) == answer_of(tmp_path / "out") == "True"
    torch.testing.assert_close(tried[1], tried[0], rtol=0, atol=1e-5)


def test_an_empty_answer_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "generate_text", lambda *_, **__: "")
    said = Console(file=io.StringIO(), width=200)
    options: dict[str, Any] = {"system": None, "max_tokens": 2, "temperature": 0.0, "seed": 0}
    assert results.generate(str(run), prompt="1", console=said, **options) == ""
    assert "the answer is empty: the model ended it at once" in said.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("gguf", [False, True])
def test_a_run_is_used_from_any_folder(
    gguf: bool, tmp_path: Path, merge: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records hold no path that is relative to where it was started."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    base = write_gguf(Path("tiny.gguf")) if gguf else base_of(Path("base"))
    assert not base.is_absolute()
    run_of(Path(), base, f"model={base}", "data.eval=rows.jsonl")
    monkeypatch.chdir("elsewhere")
    recipe = json.loads(Path("../run/run.json").read_text())["recipe"]
    assert recipe["model"] == str(tmp_path / base)
    assert recipe["data"]["train"] == recipe["data"]["eval"] == str(tmp_path / "rows.jsonl")
    config = json.loads(Path("../run/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / base)
    assert isinstance(answer_of(Path("../run")), str)
    code, _, err = merge("../run", "--out", "out", "--dtype", "float32")
    assert code == 0, err
    if not gguf:
        expected = logits(PeftModel.from_pretrained(plain(tmp_path / base), "../run/adapter"))
        torch.testing.assert_close(logits(plain(Path("out"))), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("other", [{"num_hidden_layers": 3}, {"hidden_size": 48}, {"num_hidden_layers": 1}])
def test_the_base_is_another(other: dict[str, int], run: Path, merge: Command, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "base")
    base_of(tmp_path / "base", **other)
    message = refused(merge(run, "--out", tmp_path / "out", "--json"))
    assert "adapter was trained on a model of" in message
    assert message.endswith("use the base model it was trained on")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


@pytest.mark.parametrize("other", [{"num_hidden_layers": 3}, {"hidden_size": 48}])
def test_generate_tells_of_another_base_as_merge_does(other: dict[str, int], run: Path, tmp_path: Path) -> None:
    base_of(tmp_path / "base", **other)
    with pytest.raises(
        InputError, match=r"adapter was trained on a model of [\d,]+ parameters, and .* has [\d,]+; use"
    ):
        answer_of(run)


def test_other_weights_of_the_same_shape(run: Path, merge: Command, tmp_path: Path) -> None:
    before = load_file(tmp_path / "base/model.safetensors")
    torch.manual_seed(77)
    base_of(tmp_path / "base")
    after = load_file(tmp_path / "base/model.safetensors")
    assert {name: value.shape for name, value in before.items()} == {name: value.shape for name, value in after.items()}
    message = refused(merge(run, "--out", tmp_path / "out", "--json"))
    assert f"adapter was trained on {tmp_path / 'base'} with the fingerprint" in message
    assert "another model of the same shape; put the weights it was trained on back" in message
    with pytest.raises(InputError, match="another model of the same shape"):
        answer_of(run)


def test_the_adapter_of_another_run(run: Path, merge: Command, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    other = run_of(tmp_path / "elsewhere", base_of(tmp_path / "elsewhere/base"))
    shutil.rmtree(run / "adapter")
    shutil.copytree(other / "adapter", run / "adapter")
    told = f"was trained on {tmp_path / 'elsewhere/base'} by its adapter_config.json, and the run's base model is"
    assert told in refused(merge(run, "--out", tmp_path / "out", "--json"))
    with pytest.raises(InputError, match=told):
        answer_of(run)


def test_a_run_without_a_fingerprint_is_told(run: Path, merge: Command, tmp_path: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    assert record.pop("base")["digest"]
    (run / "run.json").write_text(json.dumps(record))
    code, out, err = merge(run, "--out", tmp_path / "out")
    assert code == 0, err
    assert "that the run was trained on can't be told: it recorded no fingerprint" in " ".join((out + err).split())


def test_no_space(run: Path, merge: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    message = refused(merge(run, "--out", tmp_path / "out", "--json"))
    assert f"the merged model takes 0.07 GB, and {tmp_path} has 0.00 GB free; make room" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


def test_a_dtype_that_is_none(run: Path, merge: Command, tmp_path: Path) -> None:
    code, _, err = merge(run, "--out", tmp_path / "out", "--dtype", "int8")
    assert code == 2
    assert "int8" in err
    assert "bfloat16" in err
