"""What training refuses by the recipe, the model's configuration and the machine alone, a plan refuses with the same
message: both ask the same functions.
"""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from rich.console import Console

from packed import FAMILIES
from slipstream import cli, run
from slipstream.cost.ceilings import Ceilings
from slipstream.errors import InputError
from slipstream.plan import command, facts
from slipstream.recipe import Recipe, load_recipe
from tiny import tiny_model, tiny_tokenizer

RATES = Ceilings("float32", 2e11, 2e10, None, None, None, 5e-6, 0.0, "measured")
UNPACKED, TILES, DROPOUT = "packing.enabled=false", "memory.tiles=64", "adapter.dropout=0.1"
REFUSED: list[tuple[str, list[str], str]] = [
    ("gpt_oss", [TILES], "memory.tiles: 64: GptOssMLP sends tokens to experts"),
    ("qwen3_moe", [TILES], "memory.tiles: 64: Qwen3MoeSparseMoeBlock sends tokens to experts"),
    ("mixtral", [TILES], "memory.tiles: 64: MixtralSparseMoeBlock sends tokens to experts"),
    ("llama", [TILES, DROPOUT], "memory.tiles: 64: LlamaMLP has dropout"),
    ("llama", [TILES, DROPOUT, "adapter.targets=[q_proj, up_proj]"], "memory.tiles: 64: LlamaMLP has dropout"),
    ("gpt2", [TILES], "memory.tiles: 64: GPT2MLP has dropout"),
    ("opt", [TILES], "memory.tiles: 64: OPTDecoderLayer has no module called mlp"),
    ("bloom", [TILES, UNPACKED], "memory.tiles: 64: BloomMLP takes more than hidden states (hidden_states, residual)"),
    ("ctrl", [UNPACKED, "memory.activations=recompute"], "CTRLLMHeadModel has no layers that can be recomputed"),
    ("llama", ["adapter.experts=true"], "adapter.experts: LlamaForCausalLM has no experts"),
    ("llama", ["adapter.router=true"], "adapter.router: LlamaForCausalLM has no router"),
    ("llama", ["adapter.targets=[qq_proj]"], "adapter.targets: 'qq_proj' matches no module"),
    (
        "llama",
        ["adapter.rank=33"],
        "adapter.rank: 33 > 32, the smaller side of the largest matrix that gets an adapter",
    ),
    ("llama", ["adapter.rank=17", "adapter.targets=[k_proj]"], "adapter.rank: 17 > 16, the smaller side"),
    ("mixtral", ["adapter.rank=99999999", "adapter.experts=true"], "adapter.rank: 99,999,999 > 32, the smaller side"),
    ("llama", ["adapter.targets=[]"], "adapter.targets: [] names nothing"),
    ("llama", ["adapter.targets=[all-linear, q_proj]"], "adapter.targets: all-linear stands for all"),
    ("qwen3_moe", ["adapter.targets=[gate]"], "adapter.targets: 'gate' belongs to the experts or their router"),
    ("qwen3_moe", ["adapter.experts=true", DROPOUT], "adapter.dropout: 0.1 can't be had on experts"),
    ("llama", ["adapter.modules_to_save=[heed]"], "adapter.modules_to_save: 'heed' matches no module"),
    ("llama", ["load.new_tokens=[<a>]", "adapter.targets=[embed_tokens]"], "adapter.targets: 'embed_tokens' has its"),
    ("llama", ["load.new_tokens=[<a>]", "adapter.targets=[lm_head]"], "adapter.targets: 'lm_head' has its new"),
    ("llama", ["load.new_tokens=[<a>, <a>]"], "load.new_tokens: '<a>' is named 2 times"),
    ("llama", ["load.revision=v1"], "load.revision: v1 can't be had of"),
    ("llama", ["load.quantize=nf4"], "load.quantize: nf4 needs a CUDA card"),
    ("llama", ["train.optimizer=adamw8bit"], "train.optimizer: adamw8bit needs bitsandbytes"),
    ("llama", ["train.trackers=[wandb]"], "train.trackers: wandb is not installed"),
    ("llama", ["train.mode=captured"], "train.mode captured: CUDA graphs need a CUDA device"),
    ("llama", ["train.mode=compiled", UNPACKED], "train.mode compiled: batches are padded"),
    ("llama", ["data.learn=assistant"], "data.learn: assistant makes no sense for plain text"),
    ("llama", ["data.chat_template=nosuch.jinja"], "data.chat_template: nosuch.jinja is neither Jinja nor a file"),
    ("llama", ["data.max_length=8"], "rows longer than max_length 8"),
    ("llama", ["train.steps=null", "train.warmup=200"], "train.warmup: 200 steps >= the run's"),
    ("mamba", [], "can't be trained packed: layers that carry state across documents"),
    ("mamba", [UNPACKED, "adapter.targets=[out_proj]"], "adapter.targets: 'out_proj' of a state-space layer takes no"),
    ("xglm", [], "can't be trained packed: its attention can't be chosen"),
]
ACCEPTED: list[tuple[str, list[str]]] = [
    ("llama", [TILES, DROPOUT, "adapter.targets=[q_proj]"]),  # no dropout inside the MLP
    ("qwen3_moe", ["memory.tiles=auto", "memory.activations=recompute"]),
    ("stablelm", []),  # whose attention is handed a mask
    ("llama", ["train.sharding=fsdp2"]),
    ("llama", ["adapter.rank=32"]),  # more than keys of one head can use
    ("qwen3_moe", [UNPACKED]),
    ("gpt_oss", []),
    ("llama", ["load.new_tokens=[<a>]", "adapter.modules_to_save=[embed_tokens, lm_head]"]),
]


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a card and optional packages, whose ceilings need not be measured."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(facts, "ceilings", lambda device, driver: RATES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("slipstream.train.options.find_spec", lambda _: None)


def recipe_file(tmp_path: Path, family: str, **config: Any) -> Path:
    torch.manual_seed(0)
    tiny_model(family, **FAMILIES.get(family, {}), **config).save_pretrained(tmp_path / "model")
    tiny_tokenizer(eos="</s>").save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "x" * (20 + i)}) + "\n" for i in range(12)))
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {tmp_path / 'model'}\noutput: {tmp_path / 'out'}\ndata: {{train: {rows}}}\n")
    return path


def recipe_of(tmp_path: Path, family: str, overrides: list[str]) -> Recipe:
    small = ["packing.tokens=256", "train.steps=1", "load.dtype=float32"]
    return load_recipe(recipe_file(tmp_path, family), [*small, *overrides])


def refusal(act: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(InputError) as refused:
        act(*arguments, console=Console(file=io.StringIO()), **options)
    return str(refused.value)


@pytest.mark.parametrize(("family", "overrides", "told"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_plan_refuses_what_training_refuses(tmp_path: Path, family: str, overrides: list[str], told: str) -> None:
    recipe = recipe_of(tmp_path, family, overrides)
    planned = refusal(command.plan, recipe, device=None)
    assert planned == refusal(run.train, recipe, resume=False)
    assert told in planned


def test_the_data_is_not_shown_for_a_revision_that_a_local_model_has_not(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "llama", ["load.revision=v1"])
    assert refusal(run.show_data, recipe, rows=1) == refusal(command.plan, recipe, device=None)


@pytest.mark.parametrize(("family", "overrides"), [("llama", ["adapter.targets=[qq_proj]"]), ("mamba", [])])
def test_a_model_is_refused_before_rows_and_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, overrides: list[str]
) -> None:
    recipe = recipe_of(tmp_path, family, overrides)
    for late in ("prepare_rows", "build_model"):
        monkeypatch.setattr(run, late, lambda *_: pytest.fail("read first"))
    refusal(run.train, recipe, resume=False)


@pytest.mark.parametrize(("family", "overrides"), ACCEPTED, ids=lambda value: str(value)[:60])
def test_a_plan_accepts_what_training_accepts(tmp_path: Path, family: str, overrides: list[str]) -> None:
    recipe = recipe_of(tmp_path, family, overrides)
    document, fits = command.plan(recipe, device=None, console=Console(file=io.StringIO()))
    assert fits
    assert run.train(recipe, resume=False, console=Console(file=io.StringIO())).steps == 1
    recorded = json.loads((tmp_path / "out" / "run.json").read_text())
    parts = [{part["name"] for part in tree["memory"]["device"]} for tree in (document, recorded["plan"])]
    assert parts[0] == parts[1]
    planned, trained = decided(document), decided(recorded)
    assert planned == {name: trained[name] for name in planned}
    assert planned["packing"]["on"] == (UNPACKED not in overrides)


def decided(tree: dict[str, Any]) -> dict[str, Any]:
    """Decisions by name, but for those that tell how much memory is free at the moment."""
    told = ("packing", "attention", "experts", "tiled mlp", "step")
    return {item["name"]: item for item in tree["decisions"] if item["name"] in told}


@pytest.mark.parametrize(
    ("vocabulary", "told"),
    [(100, "has vocab_size 100, and its tokenizer gives ids up to 261"), (261, "vocab_size 261"), (262, None)],
)
def test_a_tokenizer_beyond_the_vocabulary_is_refused(tmp_path: Path, vocabulary: int, told: str | None) -> None:
    """Ids beyond are 262 to 274 at 262: of special tokens, which are added ones and get their rows."""
    path = recipe_file(tmp_path, "llama", vocab_size=vocabulary)
    recipe = load_recipe(path, ["packing.tokens=256", "train.steps=1", "load.dtype=float32"])
    if told is None:
        assert command.plan(recipe, device=None, console=Console(file=io.StringIO()))[1]
        assert run.train(recipe, resume=False, console=Console(file=io.StringIO())).steps == 1
        return
    planned = refusal(command.plan, recipe, device=None)
    assert planned == refusal(run.train, recipe, resume=False)
    assert told in planned


UNMAKEABLE: list[tuple[str, Any, str]] = [
    ("llama", {"intermediate_size": -5}, "has intermediate_size -5 < 1; mend its config.json"),
    ("llama", {"intermediate_size": 0}, "has intermediate_size 0 < 1; mend"),
    ("llama", {"num_attention_heads": 0}, "has num_attention_heads 0 < 1; mend"),
    ("qwen3", {"head_dim": -1}, "has head_dim -1 < 1; mend"),
    ("llama", {"vocab_size": 10**13}, "has vocab_size 10,000,000,000,000 > 67,108,864, the most that is reckoned"),
    ("llama", {"hidden_size": 10**12}, "has hidden_size 1,000,000,000,000 > 1,048,576, the most"),
    ("llama", {"num_hidden_layers": 10**12}, "has num_hidden_layers 1,000,000,000,000 > 4,096, the most"),
    ("gpt_oss", {"num_local_experts": -4}, "has num_local_experts -4 < 1; mend"),
    ("gpt_oss", {"num_local_experts": 0}, "has num_local_experts 0 < 1; mend"),
    ("gpt_oss", {"num_experts_per_tok": 999}, "has num_experts_per_tok 999 > num_local_experts 4: a token can't go to"),
    ("gpt_oss", {"sliding_window": -10}, "has sliding_window -10 < 1 (null is no window); mend"),
    ("llama", {"hidden_size": -1, "head_dim": 0}, "has hidden_size -1 < 1; head_dim 0 < 1; mend"),
    ("gptj", {"rotary_dim": 17}, "has rotary_dim 17 > 16, the width of a head; mend"),
    ("llama", {"pad_token_id": 10**9}, "no model can be made of the config of"),
    ("llama", [], "config.json holds no mapping of names to values; take the whole config.json"),
    ("llama", None, "config.json holds no mapping of names to values"),
    ("llama", "llama", "config.json holds no mapping of names to values"),
]
"""What is written into a model's config.json, or in its stead."""


@pytest.mark.parametrize(("family", "written", "told"), UNMAKEABLE, ids=lambda value: str(value)[:40])
def test_a_configuration_of_which_no_model_can_be_made(tmp_path: Path, family: str, written: Any, told: str) -> None:
    recipe = recipe_of(tmp_path, family, [])
    path = tmp_path / "model" / "config.json"
    changed = {**json.loads(path.read_text()), **written} if isinstance(written, dict) else written
    path.write_text(json.dumps(changed))
    planned = refusal(command.plan, recipe, device="h200")
    assert planned == refusal(run.train, recipe, resume=False)
    assert told in planned


@pytest.mark.parametrize(
    ("family", "fails", "rows"), [("gpt2", True, "train"), ("opt", True, "eval"), ("llama", False, "eval")]
)
def test_documents_beyond_the_models_positions(tmp_path: Path, family: str, fails: bool, rows: str) -> None:
    """Refused before weights are read where positions are looked up in a table; told where they go on."""
    path = recipe_file(tmp_path, family, max_position_embeddings=24)
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "xxxxxxxxxxxxxxxxx"}\n' * 12)
    sets = [f"data.train={short}", f"data.eval={tmp_path / 'rows.jsonl'}"] if rows == "eval" else []
    recipe = load_recipe(path, ["packing.tokens=256", "train.steps=1", "load.dtype=float32", *sets])
    told = "documents of up to 32 tokens > the model's 24 positions: "
    if fails:
        planned = refusal(command.plan, recipe, device="h200")
        assert planned == refusal(run.train, recipe, resume=False)
        assert planned.startswith(f"{told}it looks them up in a table, which has no more; set data.max_length: 24")
        cut = load_recipe(path, ["packing.tokens=256", "train.steps=1", "data.max_length=24", "data.overlong=truncate"])
        assert run.train(cut, resume=False, console=Console(file=io.StringIO())).steps == 1
        return
    document, fits = command.plan(recipe, device=None, console=Console(file=io.StringIO()))
    assert fits
    run.train(recipe, resume=False, console=Console(file=io.StringIO()))
    recorded = json.loads((tmp_path / "out" / "run.json").read_text())
    reasons = [item["reason"] for tree in (document, recorded) for item in tree["decisions"] if told in item["reason"]]
    assert len(reasons) == 2


@pytest.mark.parametrize("verb", ["plan", "train"])
@pytest.mark.parametrize(
    "override",
    [
        "train.epochs=1e300",
        "train.steps=100000000000000000000",
        "train.accumulate=10000000",
        "train.save_every=1e30",
        "memory.host_limit=1e308",
        "memory.buffers=100000",
    ],
)
def test_counts_beyond_reason_are_refused_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str, override: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream", verb, str(recipe_file(tmp_path, "llama")), "--set", override])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert f"{override.partition('=')[0]}: " in (said := capsys.readouterr().err)
    assert re.search(r"does not fit; give .*<= [1-9][\d,]+", said)


def test_a_refused_plan_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream", "plan", str(recipe_file(tmp_path, "mixtral")), "--set", TILES])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "MixtralSparseMoeBlock sends tokens to experts" in capsys.readouterr().err
