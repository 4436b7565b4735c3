"""Models and tokenizers from a hub id, a local folder or a GGUF file.

Everything is left to transformers' own loaders; what is added is that a wrong input is told in one sentence, before
weights are read where possible, and that weights the checkpoint lacks are an error. (transformers fills them with
random numbers and a warning: a training run would start from noise.) A GGUF file is replaced by its converted folder.

    1. locate   ``_locate``          what the user wrote → a folder, or a hub id
    2. config   ``_causal_config``   known, causal, no code of its own unless asked
    3. weights  ``load_model``       in the dtype asked for, complete, on the device

transformers and torch are imported where they are used: a recipe is checked without waiting for them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slipstream.cost.hardware import compute_dtype, describe
from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.model import gguf
from slipstream.model.config_sizes import check_sizes, text_values
from slipstream.model.loaded import check_whole
from slipstream.model.new_tokens import check_named
from slipstream.model.quantize import Quantize, keep_trainable, nf4_config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

KINDS = "give a hub id (owner/name), a model folder, or a GGUF file"
REMOTE_CODE = "read that code, then set load.trust_remote_code: true, or use a model that transformers knows"
CONFIG_FILE = "config.json"
WEIGHT_FILES = ("*.safetensors", "*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken", "*.spm")
TABLES_OF_POSITIONS = frozenset(
    {"biogpt", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "opt"}
)
"""Families that look each position up, learned or computed before: there is none beyond the last."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How the base model is loaded (the recipe's ``load`` section)."""

    revision: str | None = None
    """The hub revision: a branch, tag or commit; not for a local model, which has none."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The weights' dtype; ``auto``: bf16 where the device computes in it, else float32."""
    quantize: Quantize = "none"
    """``nf4`` holds the frozen weights of linear layers in four bits, and computes in ``dtype``."""
    trust_remote_code: bool = False
    """Run the model repository's own Python code."""
    new_tokens: list[str] = field(default_factory=list)
    """Tokens to add to the vocabulary; their rows of embedding and head are trained."""


@dataclass(frozen=True)
class _Source:
    """What the user's ``model`` means: a GGUF ``file``, or a name that transformers loads (a folder if ``local``)."""

    name: str
    local: bool
    file: gguf.GgufFile | None = None

    def in_dtype(self, dtype: str) -> str:
        """The folder or hub id to load weights from."""
        return self.name if self.file is None else str(gguf.model_folder(self.file, dtype))

    def of_tokenizer(self) -> str:
        """The folder or hub id to load the tokenizer from."""
        return self.name if self.file is None else str(gguf.tokenizer_folder(self.file))


def load(
    model: str, options: LoadOptions, *, trainable: bool = False, device: "torch.device | str" = "cpu"
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Model and tokenizer; see ``load_model`` and ``load_tokenizer``."""
    check_revision(model, options)
    source = _checked(_locate(model))
    load_config(model, options)  # what is wrong with it is known before a tokenizer is made by it
    tokenizer = _tokenizer(source, options)  # before weights: it is cheap, and what is wrong with it then known early
    return _model(source, options, trainable, device), tokenizer


def load_model(
    model: str, options: LoadOptions, *, trainable: bool = False, device: "torch.device | str" = "cpu"
) -> "PreTrainedModel":
    """A causal language model on ``device``, in evaluation mode.

    ``trainable`` says that an optimizer without masters will update the weights in place: ``dtype: auto`` then keeps
    them in float32, since bf16 has too few digits for small updates, and the trainer computes in the device's dtype by
    autocast. Raises ``InputError``.
    """
    check_revision(model, options)
    return _model(_checked(_locate(model)), options, trainable, device)


def load_tokenizer(model: str, options: LoadOptions) -> "PreTrainedTokenizerBase":
    """The tokenizer of ``model``, or of an adapter's folder; it may lack a padding token, since packed rows need none.

    Raises ``InputError``.
    """
    return _tokenizer(_locate(model), options)


def stored_dtype(model: str, options: LoadOptions) -> str | None:
    """The dtype of the checkpoint's weights by its config; None where that names none, and for a GGUF file.

    Raises ``InputError`` where the model cannot be found.
    """
    source = _checked(_locate(model))
    if source.file is not None:
        return None
    with _quiet(source), _explained(source.name):
        config = _causal_config(source.name, source, options)
    named = str(config.dtype or config.get_text_config().dtype).removeprefix("torch.")
    return named if named in ("float32", "bfloat16", "float16") else None


def load_config(model: str, options: LoadOptions) -> "PreTrainedConfig":
    """The configuration of ``model`` alone: no weights are read, and a folder need not have any. Raises ``InputError``.

    Of a GGUF file only the header is parsed, and kept beside the file's conversions.
    """
    check_revision(model, options)
    source = _locate(model)
    if source.local and source.file is None and not (Path(source.name) / CONFIG_FILE).is_file():
        raise InputError(f"model: {source.name} has no config.json; {_meant_instead(Path(source.name))}")
    with _quiet(source), _explained(source.name):
        name = source.name if source.file is None else str(gguf.config_folder(source.file))
        return _causal_config(name, source, options)


def check_revision(model: str, options: LoadOptions) -> None:
    """Raises ``InputError`` for a revision of a model that lies here, where transformers would ignore it."""
    if options.revision is not None and (source := _locate(model)).local:
        raise InputError(
            f"load.revision: {options.revision} can't be had of {source.name}, which is a "
            f"{'folder' if source.file is None else 'file'} here and has no revisions; leave load.revision out, or "
            "give the model's hub id (owner/name)"
        )


def context_length(model_config: "PreTrainedConfig") -> int | None:
    """Positions the model was made for, by its text config; None where that names no limit."""
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def check_context(config: "PreTrainedConfig", longest: int, max_length_key: str) -> Decision | None:
    """What to tell where the longest document (tokens) exceeds the model's context; None where it does not.

    No error for most: rotary positions go on beyond the limit, and training longer contexts is what some runs are for.
    Raises ``InputError`` for a model that looks positions up in a table, which ends there.
    """
    limit = context_length(config)
    if limit is None or longest <= limit:
        return None
    told = f"documents of up to {longest:,} tokens > the model's {limit:,} positions"
    remedy = f"set {max_length_key}: {limit} with data.overlong: truncate, drop or split"
    if config.get_text_config().model_type in TABLES_OF_POSITIONS:
        raise InputError(f"{told}: it looks them up in a table, which has no more; {remedy}")
    return Decision("context", False, f"{told}: it was not made for those beyond; {remedy}")


def resolve_dtype(options: LoadOptions, trainable: bool, device: "torch.device | str") -> str:
    """The weights' dtype by name, with ``auto`` resolved for the device."""
    if options.dtype != "auto":
        return options.dtype
    return "float32" if trainable else compute_dtype(describe(device))


def _model(source: _Source, options: LoadOptions, trainable: bool, device: "torch.device | str") -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    dtype = resolve_dtype(options, trainable, device)
    with _quiet(source), _explained(source.name):
        name = source.in_dtype(dtype)
        config = _causal_config(name, source, options)
        model, info = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to be told which: otherwise transformers raises without a number
            **_quantised(options, dtype, device),
            **_arguments(options),
        )
    check_whole(source.name, sorted(info["missing_keys"]), sorted(info["mismatched_keys"]))
    if source.file is not None:  # an adapter's config names its base by this: the user's file, not the cache's folder
        model.name_or_path = model.config.name_or_path = source.name
    keep_trainable(model)
    loaded: PreTrainedModel = model.to(device)
    return loaded


def _quantised(options: LoadOptions, dtype: str, device: "torch.device | str") -> dict[str, Any]:
    """What transformers is told so that weights become four-bit as they are read, each on the device."""
    import torch

    if options.quantize == "none":
        return {}
    return {"quantization_config": nf4_config(getattr(torch, dtype)), "device_map": {"": torch.device(device)}}


def _tokenizer(source: _Source, options: LoadOptions) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    if source.local and source.file is None and not _has_any(Path(source.name), TOKENIZER_FILES):
        raise InputError(
            f"model: {source.name} has no tokenizer ({', '.join(TOKENIZER_FILES[:3])}, ...); "
            "copy the tokenizer files of the base model into it"
        )
    with _quiet(source), _explained(source.name):
        _ask_hub(source, options)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.of_tokenizer(), **_arguments(options))
    check_named(options.new_tokens)
    if options.new_tokens:
        tokenizer.add_tokens(options.new_tokens)  # those that it has already stay as they are
    return tokenizer


def _arguments(options: LoadOptions) -> dict[str, Any]:
    return {"revision": options.revision or "main", "trust_remote_code": options.trust_remote_code}


# 1. locate


def _locate(model: str) -> _Source:
    """Tell a folder, a GGUF file and a hub id apart. Paths become absolute: an adapter names its base by them."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _Source(os.path.abspath(path), local=True)
    if path.is_file():
        return _Source(os.path.abspath(path), local=True, file=gguf.open_gguf(path))
    if _looks_local(model):
        raise InputError(f"model: {model} does not exist; {KINDS}")
    return _Source(model, local=False)


def _looks_local(model: str) -> bool:
    """Whether a name that does not exist on disk can only have been meant as a path: hub ids are ``owner/name``."""
    return model.startswith((".", "/", "~")) or model.endswith(gguf.SUFFIX) or model.count("/") > 1 or "\\" in model


def _checked(source: _Source) -> _Source:
    """The source itself; ``InputError`` for a folder that holds no model."""
    path = Path(source.name)
    if not source.local or source.file is not None:
        return source
    if not (path / CONFIG_FILE).is_file():
        raise InputError(f"model: {path} has no config.json; {_meant_instead(path)}")
    if not _has_any(path, WEIGHT_FILES):
        raise InputError(
            f"model: {path} has no weights ({' or '.join(WEIGHT_FILES)}); "
            "give the folder that save_pretrained wrote, or download the model again"
        )
    return source


def _meant_instead(path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return "it holds an adapter: give its base model, or merge the adapter into one"
    files = sorted(path.glob(f"*{gguf.SUFFIX}"))
    return f"give the GGUF file itself, {files[0]}" if files else KINDS


def _has_any(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(True for pattern in patterns for _ in path.glob(pattern))


# 2. config


def _causal_config(name: str, source: _Source, options: LoadOptions) -> "PreTrainedConfig":
    """The model's config, if it is of a causal language model that may be loaded."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    _ask_hub(source, options)
    try:
        raw, _ = PreTrainedConfig.get_config_dict(name, revision=options.revision or "main")
    except (TypeError, AttributeError):  # what a file that holds no mapping ends in, unless it is a list
        raw = None
    if not isinstance(raw, dict):
        raise InputError(
            f"model: {source.name}/{CONFIG_FILE} holds no mapping of names to values; take the whole config.json of "
            "the model, or use another model"
        )
    model_type, own_code = raw.get("model_type"), "AutoModelForCausalLM" in raw.get("auto_map", {})
    if not isinstance(model_type, str):
        raise InputError(
            f"model: the config of {source.name} names no model_type; take the whole config.json of the model, or use "
            "another model"
        )
    if model_type not in CONFIG_MAPPING and not own_code:
        raise InputError(
            f"model: {source.name} is of type {model_type!r}, which this version of transformers does not know; "
            "upgrade transformers, or use another model"
        )
    if model_type not in CONFIG_MAPPING and not options.trust_remote_code:
        raise InputError(f"model: {source.name} (type {model_type!r}) brings its own code; {REMOTE_CODE}")
    check_sizes(text_values(raw), source.name)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, **_arguments(options))
    except StrictDataclassError as error:
        told = " ".join(str(error).split())
        raise InputError(f"model: the config of {source.name} is not valid: {told}; mend its config.json") from error
    check_sizes(text_values(config), source.name)
    if not _is_causal(config) and not (own_code and options.trust_remote_code):
        raise InputError(
            f"model: {source.name} ({', '.join(config.architectures or [str(model_type)])}) is not a causal language "
            "model; use a model whose architecture ends in ForCausalLM"
        )
    return config


def _ask_hub(source: _Source, options: LoadOptions) -> None:
    """Fetch a hub model's config unless it is cached: the loaders try a minute long to reach a hub that isn't there.

    Raises the hub's own errors. One that answers, but not this question, is left to the loaders.
    """
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    revision = options.revision or "main"
    if source.local or isinstance(try_to_load_from_cache(source.name, CONFIG_FILE, revision=revision), str):
        return
    try:
        with _no_hub_bars():
            snapshot_download(source.name, revision=revision, allow_patterns=CONFIG_FILE)
    except LocalEntryNotFoundError as error:
        if not isinstance(error.__cause__, HfHubHTTPError):
            raise


@contextmanager
def _no_hub_bars() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _is_causal(config: "PreTrainedConfig") -> bool:
    """Whether transformers has a causal model for the config, and the checkpoint was not trained as another kind.

    (Encoders such as BERT have a causal class too, but their weights were learned with attention both ways.)
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    masked = any(name.endswith("ForMaskedLM") for name in config.architectures or [])
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not masked and not encoder_decoder


# 3. weights


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what the loaders raise about a user's model into ``InputError``; anything else passes."""
    from safetensors import SafetensorError

    try:
        yield
    except InputError:
        raise
    except SafetensorError as error:
        raise InputError(f"model: a weight file of {name} is damaged ({error}); download it again") from error
    except (OSError, ImportError, ValueError) as error:
        raise InputError(f"model: {name} {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Reason and remedy, by the hub's exception, which may lie under transformers' own."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cause = error if isinstance(error, HfHubHTTPError | LocalEntryNotFoundError) else error.__cause__
    if isinstance(cause, GatedRepoError):
        return "is gated: accept its terms on its hub page and run `hf auth login`, or give a local folder"
    if isinstance(cause, RepositoryNotFoundError):
        return "is neither a folder here nor a model on the hub; check the name, run `hf auth login` if it is private"
    if isinstance(cause, RevisionNotFoundError):
        return "has no such revision; set load.revision to a branch, tag or commit of it"
    if isinstance(cause, LocalEntryNotFoundError):
        return (
            "is no folder here, and the hub cannot be reached; check the network, run `hf auth login` if the model is "
            "gated, or give a local folder"
        )
    if "trust_remote_code" in str(error):
        return f"brings its own code; {REMOTE_CODE}"
    return f"cannot be loaded ({' '.join(str(error).split())}); check the files, or use another model"


@contextmanager
def _quiet(source: _Source) -> Iterator[None]:
    """Keep the loaders' progress bars away while local files load; a download keeps its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    if source.local:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if source.local and shown:
            logging.enable_progress_bar()
