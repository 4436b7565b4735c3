import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    T5Config,
)
from transformers.utils import logging

from slipstream.errors import InputError
from slipstream.model.load import (
    LoadOptions,
    check_context,
    context_length,
    load,
    load_config,
    load_model,
    load_tokenizer,
    resolve_dtype,
)
from tiny import CHATML, tiny_model, tiny_tokenizer

FLOAT32 = LoadOptions(dtype="float32")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with tokenizer."""
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_gives_model_and_tokenizer(folder: Path) -> None:
    model, tokenizer = load(str(folder), FLOAT32)
    saved = load_file(folder / "model.safetensors")
    assert not model.training
    assert torch.equal(model.lm_head.weight, saved["lm_head.weight"])
    assert tokenizer.chat_template == CHATML
    assert tokenizer.decode(tokenizer.encode("two words")) == "two words"


def test_a_tokenizer_without_padding_token_is_fine(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(str(folder), FLOAT32).pad_token is None


def test_new_tokens_become_one_token_each(folder: Path) -> None:
    added = LoadOptions(dtype="float32", new_tokens=["<think>", "<|im_start|>"])
    before, after = load_tokenizer(str(folder), FLOAT32), load_tokenizer(str(folder), added)
    assert len(after) == len(before) + 1  # the other was there
    assert after.encode("<think>") == [len(before)]
    assert len(before.encode("<think>")) > 1
    with pytest.raises(InputError, match=r"load\.new_tokens: item 1 of 1 is ' ', nothing but blanks; name"):
        load_tokenizer(str(folder), LoadOptions(new_tokens=[" "]))


def test_a_tokenizer_loads_from_a_folder_without_model(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)  # as beside an adapter
    assert load_tokenizer(str(tmp_path), FLOAT32).chat_template == CHATML


def test_dtype_auto_follows_the_device_and_keeps_masters_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = LoadOptions()
    for computes in ("bfloat16", "float32"):
        monkeypatch.setattr("slipstream.model.load.compute_dtype", lambda device, computes=computes: computes)
        assert resolve_dtype(auto, trainable=False, device="cpu") == computes
        assert resolve_dtype(auto, trainable=True, device="cpu") == "float32"
        assert resolve_dtype(LoadOptions(dtype="float16"), trainable=True, device="cpu") == "float16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_in_the_dtype_asked_for(folder: Path, dtype: str) -> None:
    model = load_model(str(folder), LoadOptions(dtype=dtype))
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}


def test_local_loading_shows_no_progress_bar_and_leaves_the_setting(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.enable_progress_bar()  # whatever other tests have left
    capfd.readouterr()
    load_model(str(folder), FLOAT32)
    assert "Loading weights" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere/model.gguf", "a/b/c", "~/nowhere-at-all"])
def test_a_path_that_does_not_exist(name: str) -> None:
    for function in (load_model, load_tokenizer):
        with pytest.raises(
            InputError, match=r"does not exist; give a hub id \(owner/name\), a model folder, or a GGUF"
        ):
            function(name, FLOAT32)


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"has no config\.json; give a hub id"):
        load(str(folder), FLOAT32)
    (folder / "weights.gguf").touch()
    with pytest.raises(InputError, match=r"give the GGUF file itself, .*weights\.gguf"):
        load(str(folder), FLOAT32)
    (folder / "adapter_config.json").touch()
    with pytest.raises(InputError, match="it holds an adapter: give its base model"):
        load(str(folder), FLOAT32)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no weights \(\*\.safetensors or \*\.bin\); give"):
        load_model(str(folder), FLOAT32)


def test_a_folder_without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"has no tokenizer .*; copy the tokenizer files of the base model into it"):
        load(str(folder), FLOAT32)


def test_a_damaged_weight_file(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"a weight file of .* is damaged .*; download it again"):
        load_model(str(folder), FLOAT32)


def test_a_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(str(folder), FLOAT32)


def test_weights_that_the_checkpoint_lacks_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 of the model's weights, e\.g\. model\.layers\.1\.mlp\.up_proj"):
        load_model(str(folder), FLOAT32)


@pytest.mark.parametrize("rows", [300, 4000])
def test_an_embedding_of_another_size_than_the_config_says(folder: Path, rows: int) -> None:
    weights = load_file(folder / "model.safetensors")
    held, width = weights["model.embed_tokens.weight"].shape
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.zeros(rows, width)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError) as refused:
        load_model(str(folder), FLOAT32)
    assert str(refused.value) == (
        f"model: the checkpoint {folder} holds lm_head.weight as {rows:,} × {width}, and its config.json makes it "
        f"{held} × {width} (and so on, 2 weights in all); mend config.json (vocab_size is the rows of the embedding), "
        "or use the weights that belong to it"
    )


def test_a_revision_of_a_local_model_is_refused(folder: Path) -> None:
    told = (
        r"load\.revision: v1 can't be had of .*, which is a folder here and has no revisions; leave load\.revision out"
    )
    options = LoadOptions(dtype="float32", revision="v1")
    for act in (load_model, load_config, load):
        with pytest.raises(InputError, match=told):
            act(str(folder), options)
    assert load_tokenizer(str(folder), options)  # an adapter's folder is local where its base is not


def test_tied_weights_are_not_missing(folder: Path) -> None:
    tiny_model(tie_word_embeddings=True).save_pretrained(folder)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")  # the interesting case
    model = load_model(str(folder), FLOAT32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_other_kinds_of_model_are_refused(tmp_path: Path) -> None:
    bert = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=50,
        is_decoder=False,
    )
    BertForMaskedLM(bert).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"\(BertForMaskedLM\) is not a causal language model; use"):
        load_model(str(tmp_path), FLOAT32)
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"\(T5ForConditionalGeneration\) is not a causal language model"):
        load_model(str(tmp_path), FLOAT32)


def test_code_of_the_models_own_is_not_run_unless_asked(folder: Path) -> None:
    ran = folder / "ran"
    (folder / "own.py").write_text(
        "from pathlib import Path\n"
        f"Path({str(ran)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    edit_config(folder, model_type="own", architectures=["OwnModel"])
    with pytest.raises(InputError, match=r"is of type 'own', which this version of transformers does not know"):
        load_model(str(folder), FLOAT32)
    edit_config(folder, auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"})
    with pytest.raises(InputError, match=r"\(type 'own'\) brings its own code; .* load\.trust_remote_code: true"):
        load_model(str(folder), FLOAT32)
    assert not ran.exists()
    model = load_model(str(folder), LoadOptions(dtype="float32", trust_remote_code=True))
    assert type(model).__name__ == "OwnModel"
    assert ran.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "names no model_type"),
        ({"hidden_size": "foo"}, "is not valid.*hidden_size.*mend its config.json"),
        ({"num_hidden_layers": -5}, "has num_hidden_layers -5 < 1"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 attention heads, not a multiple of its 3 key"),
    ],
)
def test_sizes_of_which_no_model_can_be_made(folder: Path, changes: dict[str, object], message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(InputError, match=message):
        load_model(str(folder), FLOAT32)


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (GatedRepoError, "is gated: .*`hf auth login`, or give a local folder"),
        (RepositoryNotFoundError, "is neither a folder here nor a model on the hub"),
        (RevisionNotFoundError, r"has no such revision; set load\.revision"),
    ],
)
def test_what_the_hub_refuses(monkeypatch: pytest.MonkeyPatch, cause: type[Exception], message: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise cause.__new__(cause)  # their constructors want a whole response

    def refuse_in_transformers_words(*_: object, **__: object) -> None:
        raise OSError("transformers' own words") from cause.__new__(cause)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    for function in (load_model, load_tokenizer):
        with pytest.raises(InputError, match=f"model: owner/name {message}"):
            function("owner/name", FLOAT32)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: None)
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", refuse_in_transformers_words)
    with pytest.raises(InputError, match=f"model: owner/name {message}"):
        load_model("owner/name", FLOAT32)


def test_a_hub_that_does_not_answer_is_told_at_once_and_without_its_retries(tmp_path: Path) -> None:
    program = (
        "from slipstream.model.load import LoadOptions, load_model, load_tokenizer\n"
        "from slipstream.errors import InputError\n"
        "import time, transformers\n"
        "from huggingface_hub import constants\n"
        "assert not constants.HF_HUB_OFFLINE\n"
        "began = time.monotonic()\n"
        "for function in (load_model, load_tokenizer):\n"
        "    try:\n        function('nobody/nomodel', LoadOptions(dtype='float32'))\n"
        "    except InputError as error:\n        print(error)\n"
        "print(time.monotonic() - began < 20)\n"
    )
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **nowhere}, capture_output=True, text=True, check=True
    )
    *told, quick = ran.stdout.splitlines()
    assert len(told) == 2
    assert all("nobody/nomodel is no folder here, and the hub cannot be reached" in line for line in told)
    assert quick == "True"
    assert "Retrying" not in ran.stderr


def test_a_hub_that_cannot_be_reached() -> None:
    # The tests run with the hub switched off, which is told the same way as no network.
    for function in (load_model, load_tokenizer):
        with pytest.raises(InputError, match="model: owner/name is no folder here, and the hub cannot be reached"):
            function("owner/name", FLOAT32)


def test_the_context_is_the_text_configs() -> None:
    assert context_length(LlamaConfig(max_position_embeddings=512)) == 512
    assert context_length(GPT2Config(n_positions=64)) == 64
    assert context_length(Gemma3Config(text_config={"max_position_embeddings": 96})) == 96
    assert context_length(BloomConfig()) is None  # positions by distance, without a limit
    assert context_length(MambaConfig()) is None


def test_documents_longer_than_the_context_are_told() -> None:
    config = LlamaConfig(max_position_embeddings=512)
    assert check_context(config, 512, "data.max_length") is None
    assert check_context(MambaConfig(), 10**9, "data.max_length") is None
    decision = check_context(config, 811, "data.max_length")
    assert decision is not None
    assert decision.name == "context"
    assert not decision.on
    assert decision.reason.startswith("documents of up to 811 tokens > the model's 512 positions: ")
    assert decision.reason.endswith("set data.max_length: 512 with data.overlong: truncate, drop or split")
