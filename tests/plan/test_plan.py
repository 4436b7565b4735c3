"""Plans on described devices: what is on and why, what fits, and what would make it fit. No weights exist anywhere."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cost.configs import GPT_OSS_20B, QWEN3_06B, QWEN3_14B
from planning import CPU_RATES, GIB, decisions, plan, recipe_of
from slipstream.data.packing import pack
from slipstream.errors import InputError
from slipstream.model.trainable import trainable_summary
from slipstream.plan import command, facts, prediction, search
from slipstream.prepare import build_model
from slipstream.recipe import Recipe
from tiny import tiny_model, tiny_tokenizer
from tiny_gguf import LAYERS, write_gguf


def test_a_plan_that_fits(tmp_path: Path) -> None:
    document, fits, said = plan(recipe_of(tmp_path))
    assert fits
    assert document["fits"]
    assert document["parameters"] == {"total": 596_049_920, "trained": 10_092_544}
    assert document["packing"]["fill"] == 1000 / 1024  # 100 + 200 + 300 + 400 tokens a row
    assert document["packing"]["padded_ratio"] > 1.2
    assert document["steps"] == document["packing"]["rows"] == 16
    assert document["remedies"] == []
    assert document["device_bytes"] == pytest.approx(sum(p["bytes"] for p in document["memory"]["device"]), abs=20)
    assert document["seconds"] == pytest.approx(16 * document["step_seconds"])
    assert document["tokens_per_second"] == pytest.approx(1000 / document["step_seconds"], rel=0.03)
    assert "fits: a step takes" in said
    assert "of the 130.9 GiB usable on NVIDIA H200" in said
    assert not (tmp_path / "out").exists()


def test_gains_are_differences_of_predictions(tmp_path: Path) -> None:
    document, _, _ = plan(recipe_of(tmp_path))
    gains = {gain["name"]: gain for gain in document["gains"]}
    ratio = document["packing"]["padded_ratio"]
    assert gains["packing"]["seconds"] == pytest.approx((ratio - 1) * document["step_seconds"])
    assert gains["boundaries built once"]["seconds"] == pytest.approx(27 * 0.2e-3)
    assert gains["chunked loss"]["on"]
    assert gains["recompute"]["on"] is False
    assert gains["recompute"]["bytes"] > 0 >= gains["recompute"]["seconds"]
    assert gains["captured step"]["seconds"] > 0


def test_what_does_not_fit_and_what_makes_it_fit(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, QWEN3_06B, "packing.tokens=16384", "memory.activations=keep")
    document, fits, said = plan(recipe, "rtx-4090-laptop")
    assert not fits
    assert document["device_bytes"] > document["room_bytes"]
    assert "does not fit: a step takes" in said
    one_change = document["remedies"]
    assert one_change
    assert all(len(remedy["changes"]) == 1 for remedy in one_change)
    assert {"memory.activations": "recompute"} in [remedy["changes"] for remedy in one_change]
    for remedy in one_change:
        assert remedy["device_bytes"] <= document["room_bytes"]
        overrides = [f"{key}={value}" for key, value in remedy["changes"].items()]
        again = recipe_of(tmp_path, tmp_path / "model", "packing.tokens=16384", "memory.activations=keep", *overrides)
        assert plan(again, "rtx-4090-laptop")[1]  # as told, it does
        assert f"--set {overrides[0]}" in said


def test_shorter_rows_never_cut_a_document_silently(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, QWEN3_14B, "packing.tokens=512")
    document, fits, said = plan(recipe, "rtx-3060-laptop")
    assert not fits
    changed = {key: value for remedy in document["remedies"] for key, value in remedy["changes"].items()}
    assert changed.get("packing.tokens", 400) >= 400
    if not document["remedies"]:
        assert "take a smaller model, or a larger device" in said


CLASSES = {
    "rtx-4060-laptop": ("bfloat16", "varlen", True),
    "rtx-2070-laptop": ("float32", "sdpa", False),
    "h200": ("bfloat16", "varlen", True),
    "t4": ("float32", "sdpa", False),
    "dgx-spark": ("bfloat16", "varlen", True),
}


@pytest.mark.parametrize("name", CLASSES)
def test_device_classes(name: str, tmp_path: Path) -> None:
    compute, attention, bf16 = CLASSES[name]
    document, _, _ = plan(recipe_of(tmp_path), name)
    made = decisions(document)
    assert document["choices"]["compute"] == document["choices"]["weights"] == compute
    assert made["attention"][1].startswith(f"{attention}: ")
    assert made["bf16"][0] is bf16
    assert bf16 or "float32 is used" in made["bf16"][1]
    assert any(part["name"] == "attention mask" for part in document["memory"]["device"]) == (attention == "sdpa")
    assert ("offload" in {gain["name"] for gain in document["gains"]}) == (name != "dgx-spark")


def test_one_memory_is_no_place_to_move_to(tmp_path: Path) -> None:
    document, _, _ = plan(recipe_of(tmp_path, QWEN3_06B, "packing.tokens=98304"), "dgx-spark")
    made = decisions(document)
    assert made["recompute"][0]
    assert (made["offload"][0], "one memory with the host" in made["offload"][1]) == (False, True)


@pytest.mark.usefixtures("cpu_machine")
def test_a_machine_without_a_card(tmp_path: Path) -> None:
    document, fits, said = plan(recipe_of(tmp_path), None)
    assert fits
    assert document["free_bytes"] == 8 * GIB
    assert document["choices"]["compute"] == "float32"
    assert document["step_seconds"] > document["floor_seconds"] > 1
    assert not {"captured step", "offload"}.intersection(gain["name"] for gain in document["gains"])
    assert "host meanwhile" not in said


@pytest.mark.usefixtures("cpu_machine")
def test_a_device_that_doctor_described_elsewhere(tmp_path: Path) -> None:
    told = {
        "devices": [
            {
                "kind": "cuda",
                "name": "another card",
                "memory_bytes": 24 * GIB,
                "compute_capability": [8, 9],
                "bf16": True,
                "unified_memory": False,
                "a later version's fact": 1,
            }
        ],
        "ceilings": {**vars(CPU_RATES), "dtype": "bfloat16", "matmul": 1e14, "copy": 9e11, "to_device": 2e10},
        "host_memory": {"usable_bytes": 32 * GIB},
    }
    path = tmp_path / "other.json"
    path.write_text(json.dumps(told))
    document, fits, said = plan(recipe_of(tmp_path), str(path))
    assert fits
    assert "another card" in said
    assert document["ceilings"]["matmul"] == 1e14
    path.write_text("{}")
    with pytest.raises(InputError, match=r"no device with ceilings in it.*doctor --json"):
        plan(recipe_of(tmp_path, tmp_path / "model"), str(path))


def test_experts(tmp_path: Path) -> None:
    document, fits, _ = plan(recipe_of(tmp_path, {**GPT_OSS_20B, "num_hidden_layers": 4, "layer_types": None}))
    gains = {gain["name"]: gain for gain in document["gains"]}
    assert fits
    assert gains["grouped experts"]["seconds"] > 0
    assert decisions(document)["attention"][1].startswith("varlen")  # sinks are no obstacle


def test_evaluations_and_accumulation_take_time(tmp_path: Path) -> None:
    plain, _, _ = plan(recipe_of(tmp_path))
    rows = tmp_path / "rows.jsonl"
    more = [f"data.eval={rows}", "train.eval_every=2", "train.accumulate=4"]
    judged, _, _ = plan(recipe_of(tmp_path, tmp_path / "model", *more))
    assert judged["steps"] == 4
    assert judged["times"]["matmul"] == pytest.approx(4 * plain["times"]["matmul"])
    forward = judged["step_seconds"] / 4 / 3  # of a batch's forward and its backward, which takes twice as long
    assert judged["seconds"] == pytest.approx(4 * judged["step_seconds"] + 3 * 16 * forward)


def test_unpacked_documents_take_the_widest_batch(tmp_path: Path) -> None:
    off = ("packing.enabled=false", "packing.rows=4")
    document, _, said = plan(recipe_of(tmp_path, QWEN3_06B, *off))
    assert document["choices"]["tokens"] == 4 * 400
    assert "not packed: " in said
    assert decisions(document)["packing"][0] is False
    assert "packing" not in {gain["name"] for gain in document["gains"]}


def test_recurrent_layers_can_not_be_packed(tmp_path: Path) -> None:
    config = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 320}
    with pytest.raises(InputError):
        plan(recipe_of(tmp_path, config))


def test_a_gguf_header_is_enough(tmp_path: Path) -> None:
    document, fits, _ = plan(recipe_of(tmp_path, write_gguf(tmp_path / "tiny.gguf"), "packing.tokens=1024"))
    assert fits
    assert document["parameters"]["trained"] > 0
    converted = list((tmp_path / "caches" / "slipstream" / "models").iterdir())
    assert sorted(entry.name for folder in converted for entry in folder.iterdir()) == ["config", "tokenizer"]
    assert LAYERS == 2


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(InputError, match=r"has no config.json"):
        plan(recipe_of(tmp_path, tmp_path / "model"))


def test_trained_weights(tmp_path: Path) -> None:
    document, _, _ = plan(recipe_of(tmp_path, QWEN3_06B, "adapter.kind=none"))
    assert document["parameters"]["trained"] == document["parameters"]["total"]
    assert "adapters" not in {part["name"] for part in document["memory"]["device"]}
    saved, _, _ = plan(recipe_of(tmp_path, tmp_path / "model", "adapter.modules_to_save=[norm]"))
    assert saved["parameters"]["trained"] == 10_092_544 + 1024


def test_what_training_would_refuse_is_refused_here(tmp_path: Path) -> None:
    for key in ("adapter.experts", "adapter.router"):
        with pytest.raises(InputError, match=rf"{key}: Qwen3ForCausalLM has no .* to adapt"):
            plan(recipe_of(tmp_path, QWEN3_06B, f"{key}=true"))
    with pytest.raises(InputError, match=r"modules_to_save: 'lm_heed' matches no module; did you mean lm_head"):
        plan(recipe_of(tmp_path, QWEN3_06B, "adapter.modules_to_save=[lm_heed]"))
    with pytest.raises(InputError, match=r"train.warmup: 20 steps >= the run's 16, .* raise train.epochs"):
        plan(recipe_of(tmp_path, QWEN3_06B, "train.warmup=20"))
    assert plan(recipe_of(tmp_path, QWEN3_06B, "load.quantize=nf4"))[1]


def test_a_model_that_can_not_be_packed_is_refused_as_training_does(tmp_path: Path) -> None:
    short = {"model_type": "lfm2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = {**short, "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    with pytest.raises(InputError, match=r"can't be trained packed: layers that carry state.*packing.enabled: false"):
        plan(recipe_of(tmp_path, {**config, "vocab_size": 320}))
    _, fits, _ = plan(recipe_of(tmp_path, tmp_path / "model", "packing.enabled=false"))
    assert fits


@pytest.mark.usefixtures("cpu_machine")
def test_packages_are_looked_for_where_the_plan_is_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.train.options.find_spec", lambda _: None)
    for override, told in (("trackers=[wandb]", "wandb is not installed"), ("optimizer=adamw8bit", "needs bitsandbyt")):
        recipe = recipe_of(tmp_path, QWEN3_06B, f"train.{override}")
        with pytest.raises(InputError, match=told):
            plan(recipe, None)
        assert plan(recipe, "h200")[1]


def test_sharding_is_told_as_a_single_process_trains(tmp_path: Path) -> None:
    document, fits, said = plan(recipe_of(tmp_path, QWEN3_06B, "train.sharding=fsdp2"))
    assert fits
    assert decisions(document)["sharding"] == (
        False,
        "a plan is for one process, with all weights in it, and one process has no one to divide with; start several",
    )
    assert "sharding: off (a plan is for one process" in said
    assert "sharding" not in decisions(plan(recipe_of(tmp_path, tmp_path / "model"))[0])


def test_a_model_that_can_not_be_divided_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = command.skeleton

    def without_layers(recipe: Recipe) -> Any:
        model = skeleton(recipe)
        model._no_split_modules = None
        return model

    monkeypatch.setattr(command, "skeleton", without_layers)
    recipe = recipe_of(tmp_path, QWEN3_06B, "train.sharding=fsdp2")
    with pytest.raises(InputError, match="Qwen3ForCausalLM names no layers to divide it by"):
        plan(recipe)
    assert plan(recipe_of(tmp_path, tmp_path / "model"))[1]


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ("['']", "item 1 of 1 is '', nothing but blanks"),
        ("['<a>', ' ']", "item 2 of 2 is ' ', nothing but blanks"),
        ("['<a>', '<b>', '<a>']", r"'<a>' is named 2 times \(items 1 and 3\)"),
        ("[7]", "load.new_tokens"),
        ("<a>", "load.new_tokens"),
    ],
)
def test_odd_new_tokens_are_refused(tmp_path: Path, tokens: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        plan(recipe_of(tmp_path, QWEN3_06B, f"load.new_tokens={tokens}"))


def test_tokens_that_are_not_new_are_told(tmp_path: Path) -> None:
    document, _, said = plan(recipe_of(tmp_path, QWEN3_06B, "load.new_tokens=['<a>', '</s>']"))
    assert decisions(document)["new tokens"] == (
        True,
        "1 token added to the vocabulary; there already, and trained as they are: </s>",
    )
    assert "there already, and trained as they are: </s>" in said
    document, _, _ = plan(recipe_of(tmp_path, tmp_path / "model", "load.new_tokens=['</s>']"))
    assert decisions(document)["new tokens"][0] is False
    assert "new tokens" not in decisions(plan(recipe_of(tmp_path, tmp_path / "model"))[0])


@pytest.mark.usefixtures("cpu_machine")
def test_four_bits_need_a_card_in_a_plan_too(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"load.quantize: nf4 needs a CUDA card"):
        plan(recipe_of(tmp_path, QWEN3_06B, "load.quantize=nf4"), None)


def test_documents_are_packed_once_for_all_predictions_that_ask_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 14B parameters and 100,000 rows, where nothing fits and many changes are tried."""
    recipe = recipe_of(tmp_path, QWEN3_14B, "packing.tokens=2048", "load.dtype=float32", "adapter.rank=64")
    model = facts.skeleton(recipe)
    shape, adapted = facts.shape_of(model), facts.adapted_sizes(recipe.adapter, model)
    lengths = np.random.default_rng(0).integers(20, 1500, size=100_000)
    found = facts.Facts(model, shape, adapted, 0, lengths, None, {})
    made: list[tuple[int, int | None]] = []
    tried: list[Recipe] = []

    def counted_pack(sizes: Any, capacity: int, **options: Any) -> list[list[int]]:
        made.append((capacity, options["window"]))
        return pack(sizes, capacity, **options)

    def counted_predict(changed: Recipe, *rest: Any) -> Any:
        tried.append(changed)
        return prediction.predict(changed, *rest)

    monkeypatch.setattr(prediction, "pack", counted_pack)
    monkeypatch.setattr(search, "predict", counted_predict)
    began = time.process_time()
    assert search.remedies(recipe, found, facts.target("rtx-3060-laptop")) == []
    assert time.process_time() - began < 10  # about 2, and 20 where each prediction packs
    assert len(tried) > 20
    assert sorted(made) == sorted(set(made))
    assert {capacity for capacity, _ in made} == {changed.packing.tokens for changed in tried}


def test_another_way_of_packing_is_not_taken_for_one_that_was_made(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    model = facts.skeleton(recipe)
    found = facts.Facts(model, facts.shape_of(model), (), 0, np.array([300, 500, 700] * 9), np.array([90] * 9), {})
    kept = [prediction.packing_of(recipe, found), prediction.packing_of(recipe, found, held_out=True)]
    for override in ("packing.tokens=2048", "packing.window=3", "train.seed=1", "data.max_length=400"):
        kept.append(prediction.packing_of(recipe_of(tmp_path, tmp_path / "model", override), found))
    for rows in (1, 2):
        off = ("packing.enabled=false", f"packing.rows={rows}")
        kept.append(prediction.packing_of(recipe_of(tmp_path, tmp_path / "model", *off), found))
    assert len({id(one) for one in kept}) == len(found.packings) == 8
    assert prediction.packing_of(recipe_of(tmp_path, tmp_path / "model", "packing.rows=4"), found) is kept[0]
    assert kept[-1][0].padded_tokens != kept[-2][0].padded_tokens


def test_tiles_are_planned_as_training_has_them(tmp_path: Path) -> None:
    recompute, dropout = "memory.activations=recompute", "adapter.dropout=0.1"
    for asked, activations, layers in (("64", "memory.activations=keep", 28), ("64", recompute, 28)):
        on, reason = decisions(plan(recipe_of(tmp_path, QWEN3_06B, f"memory.tiles={asked}", activations))[0])[
            "tiled mlp"
        ]
        assert on
        assert reason.startswith(f"the MLPs of {layers} layers run 64 tokens at a time, so that")
    long = ["packing.tokens=65536", recompute]
    assert "8,192 tokens" in decisions(plan(recipe_of(tmp_path, QWEN3_06B, *long))[0])["tiled mlp"][1]
    for without, why in (("memory.tiles=none", "asked for: tiles none"), (dropout, "Qwen3MLP has dropout, which")):
        on, reason = decisions(plan(recipe_of(tmp_path, QWEN3_06B, *long, without))[0])["tiled mlp"]
        assert (on, reason.startswith(why)) == (False, True)
    assert "tiled mlp" not in decisions(plan(recipe_of(tmp_path, tmp_path / "model"))[0])
    document, _, _ = plan(
        recipe_of(tmp_path, tmp_path / "model", "memory.tiles=64", dropout, "adapter.targets=[q_proj]")
    )
    assert decisions(document)["tiled mlp"][0]  # no dropout inside the MLP


def test_what_tiles_cost_and_save(tmp_path: Path) -> None:
    gains = {}
    for activations in ("keep", "recompute"):
        asked = ("packing.tokens=65536", "memory.tiles=8192", f"memory.activations={activations}")
        document, _, _ = plan(recipe_of(tmp_path, QWEN3_06B, *asked))
        (gains[activations],) = [gain for gain in document["gains"] if gain["name"] == "tiled mlp"]
    assert all(gain["on"] and gain["bytes"] > 0 for gain in gains.values())
    assert gains["keep"]["seconds"] < 0  # MLPs are computed twice
    assert 2 * abs(gains["recompute"]["seconds"]) < abs(gains["keep"]["seconds"])  # kernels alone, one a tile


def test_positions_that_the_host_scales_are_not_captured(tmp_path: Path) -> None:
    scaled = {**QWEN3_06B, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    document, _, _ = plan(recipe_of(tmp_path, scaled))
    assert document["choices"]["mode"] == "compiled"
    with pytest.raises(InputError, match=r"train.mode captured: rotary positions are scaled by each document's length"):
        plan(recipe_of(tmp_path, tmp_path / "model", "train.mode=captured"))
    assert plan(recipe_of(tmp_path, QWEN3_06B))[0]["choices"]["mode"] == "captured"


def test_a_remedy_that_is_refused_is_none(tmp_path: Path) -> None:
    """Offloading into less host memory than one input takes ends the search for other remedies no more."""
    asked = ("packing.tokens=16384", "memory.host_limit=0.01")
    document, fits, _ = plan(recipe_of(tmp_path, QWEN3_14B, *asked), "rtx-3060-laptop")
    assert not fits
    assert not any("offload" in remedy["changes"].values() for remedy in document["remedies"])


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", []),
        ("llama", ["adapter.modules_to_save=[lm_head]"]),
        ("llama", ["adapter.modules_to_save=[lm_head, embed_tokens]"]),
        ("llama", ["adapter.kind=none"]),
        ("gemma2", []),  # whose head is its embedding
    ],
)
@pytest.mark.usefixtures("cpu_machine")
def test_rows_of_new_tokens_are_counted(tmp_path: Path, family: str, overrides: list[str]) -> None:
    tiny_model(family).save_pretrained(tmp_path / "model")
    tiny_tokenizer(eos="</s>").save_pretrained(tmp_path / "model")
    named = f"load.new_tokens={['</s>', *(f'<{i}>' for i in range(100))]}"
    without = plan(recipe_of(tmp_path, tmp_path / "model", *overrides), None)[0]
    recipe = recipe_of(tmp_path, tmp_path / "model", named, *overrides)
    document = plan(recipe, None)[0]
    made = trainable_summary(build_model(recipe, torch.device("cpu")))
    assert document["parameters"]["trained"] == made.trainable > without["parameters"]["trained"]
    assert document["parameters"]["total"] > without["parameters"]["total"]  # the matrices have grown
    parts = [{part["name"]: part["bytes"] for part in one["memory"]["device"]} for one in (without, document)]
    more = made.trainable - without["parameters"]["trained"]
    assert parts[1]["optimizer"] - parts[0]["optimizer"] == 8 * more


@pytest.mark.parametrize("family", ["mamba", "rwkv"])
@pytest.mark.usefixtures("cpu_machine")
def test_of_recurrent_layers_what_can_be_counted_is(tmp_path: Path, family: str) -> None:
    config = AutoConfig.for_model(family, hidden_size=32, num_hidden_layers=2, vocab_size=320)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer(eos="</s>").save_pretrained(tmp_path / "model")
    off = ("packing.enabled=false", "packing.rows=2", "load.dtype=float32")
    recipe = recipe_of(tmp_path, tmp_path / "model", *off)
    document, fits, said = plan(recipe, None)
    made = trainable_summary(build_model(recipe, torch.device("cpu")))
    assert fits
    assert document["fits"] is None
    assert document["parameters"] == {"total": made.total - made.trainable, "trained": made.trainable}
    parts = {part["name"]: part["bytes"] for part in document["memory"]["device"]}
    weights, trained = 4 * (made.total - made.trainable), 4 * made.trainable
    assert parts == {"weights": weights, "adapters": trained, "gradients": trained, "optimizer": 2 * trained}
    assert document["least_bytes"] == sum(parts.values())
    assert document["steps"] == 32
    assert decisions(document)["packing"][0] is False
    assert f"type '{family}') names no attention heads" in document["missing"]
    assert said.count("not predicted: activations, and the time of a step: its configuration (type") == 1
    full, fits, said = plan(recipe_of(tmp_path, tmp_path / "model", *off, "adapter.kind=none"), None)
    assert full["parameters"]["trained"] == made.total - made.trainable
    for refused, told in (("train.mode=compiled", "train.mode compiled"), ("train.warmup=99", "train.warmup: 99")):
        with pytest.raises(InputError, match=told):
            plan(recipe_of(tmp_path, tmp_path / "model", *off, refused), None)


@pytest.mark.usefixtures("cpu_machine")
def test_recurrent_layers_whose_weights_alone_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 320}
    monkeypatch.setattr(facts, "free_bytes", lambda device: 1000)
    document, fits, said = plan(recipe_of(tmp_path, config, "packing.enabled=false"), None)
    assert (fits, document["fits"]) == (False, False)
    assert "does not fit: " in said
