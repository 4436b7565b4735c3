"""Low-rank adapters through peft: which modules get one, and what is trained in the end.

peft has its own ``all-linear``, but it takes whatever is linear: a router, an expert's matrices where they are modules,
a projection outside the layers. Here the dense linear layers of the decoder are listed by name and peft is given that
list, so that what is trained is known before it is built. peft also ignores a target that matches nothing as long as
another matches; here each must match, or the user hears of it. The alternative, patterns for each model family, would
be shorter to write down and wrong for the next family.

What is left alone (mixture of experts), unless ``experts`` or ``router`` asks for it: everything under a module called
``experts`` or of a class ``*Experts``; a ``router``; a ``gate`` that stands beside experts; the ``shared_expert_gate``.
Shared experts see every token: dense. Stacks of experts' matrices and routers that are bare parameters get peft's
adapters on parameters (``target_parameters``), so that they load in plain peft.

In some of these families a dense layer shares its name with what the experts' fused matrices were called before, and
peft, when it builds or loads an adapter, takes the name for the experts. No adapter on such a layer would load in plain
peft, so none is put there: ``all-linear`` leaves it out, says so (``left_out``), and naming it is an error. The
same holds for what a state-space layer's kernels pass by (``model/state_space.py``).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt

from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.model.new_tokens import trainable_rows, without_copies, without_matrices
from slipstream.model.state_space import passed_by, untrainable
from slipstream.model.trainable import group_name

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
SHOWN_NAMES = 12
"""How many existing names an error lists."""
ANOTHER_ADAPTER = "restore it, or delete that folder to use the run's last checkpoint"
FUSED_PAIRS = frozenset({"gate_proj", "up_proj", "w1", "w3"})
"""Names that peft wants to see together, since they are fused into one matrix in an expert."""


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """What is trained (the recipe's ``adapter`` section)."""

    kind: Literal["lora", "none"] = "lora"
    """``lora`` trains low-rank adapters; ``none`` trains all weights."""
    rank: Annotated[int, Gt(0)] = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Gt(0)] = 16
    """Scale numerator: the adapter's output is scaled by alpha / rank (alpha / sqrt(rank) with ``rslora``)."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout on the adapters' input."""
    rslora: bool = False
    """Rank-stabilised scaling."""
    targets: str | list[str] = ALL_LINEAR
    """Module names to adapt; ``all-linear`` means the dense linear layers, leaving experts and router alone."""
    experts: bool = False
    """Adapters on the experts' matrices, too."""
    router: bool = False
    """Adapters on the routers, which choose the experts, too; else they stay as they are."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules trained whole and saved beside the adapter, e.g. ``lm_head``."""


def add_adapter(
    model: "PreTrainedModel", options: AdapterOptions, *, seed: int, new_tokens: Sequence[int] = ()
) -> "PeftModel":
    """Wrap the model with fresh low-rank adapters (float32, as is peft's default); the base weights are frozen.

    ``new_tokens``: tokens whose rows of embedding and head are trained as well (see ``model/new_tokens.py``).
    The same seed gives the same adapters whatever was drawn before, and the random generators are left as they were.
    Raises ``InputError`` as ``check_adapter`` does.
    """
    import torch
    from peft import LoraConfig, TaskType, get_peft_model

    assert options.kind == "lora"
    check_adapter(model, options, new_tokens)
    routed_modules, routed_parameters = _routed_targets(model, options)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        use_rslora=options.rslora,
        target_modules=[*resolve_targets(model, options), *routed_modules],
        target_parameters=routed_parameters or None,
        modules_to_save=list(options.modules_to_save) or None,
        trainable_token_indices=trainable_rows(model, new_tokens, options.modules_to_save),
    )
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        targets = set(config.target_modules)
        adapted: PeftModel = get_peft_model(model, config)
    assert set(adapted.targeted_module_names) == targets
    assert set(adapted.targeted_parameter_names) == set(routed_parameters)
    if new_tokens:
        without_copies(adapted)
        without_matrices(adapted)
    return adapted


def load_adapter(model: "PreTrainedModel", folder: Path) -> "PeftModel":
    """Wrap the model with a saved adapter, to be used, not trained.

    Raises ``InputError`` for one that does not fit, is not whole (peft would look for it on the hub) or is damaged.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    _check_whole(folder)
    try:
        return PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError) as error:  # peft: other shapes; no module of that name
        raise InputError(
            f"adapter: {folder} does not fit {model.name_or_path} ({error}); use the base model it was trained on"
        ) from error
    except SafetensorError as error:
        raise InputError(f"adapter: the weights in {folder} are damaged ({error}); {ANOTHER_ADAPTER}") from error


def _check_whole(folder: Path) -> None:
    config = folder / "adapter_config.json"
    if not config.is_file():
        raise InputError(f"adapter: {folder} has no adapter_config.json; give the adapter folder of a finished run")
    try:
        whole = "peft_type" in json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        whole = False
    if not whole:
        raise InputError(f"adapter: {config} is damaged; {ANOTHER_ADAPTER}")
    if not any((folder / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        raise InputError(f"adapter: {folder} has no adapter_model.safetensors; {ANOTHER_ADAPTER}")


def resolve_targets(model: "PreTrainedModel", options: AdapterOptions) -> list[str]:
    """Full names of the modules that get an adapter, in the model's order. Raises ``InputError``.

    A target is a module's name or the end of one after a dot (``q_proj``, ``self_attn.q_proj``), as in peft.
    """
    names = _names(options.targets)
    if names == [ALL_LINEAR]:
        return _all_linear(model, options)
    candidates = _adaptable(model, options)
    for name in names:
        if not any(_ends_with(module, name) for module in candidates):
            raise InputError(_no_match(model, name, candidates))
    wanted = [module for module in candidates if any(_ends_with(module, name) for name in names)]
    if dead := untrainable(model, wanted):
        raise InputError(
            f"adapter.targets: {_leaf(dead[0])!r} of a state-space layer takes no adapter, since its kernels read the "
            f"weight and pass the adapter by; leave it out, or use {ALL_LINEAR}"
        )
    if redirected := _taken_for_experts(model, wanted):
        raise InputError(f"adapter.targets: peft takes {redirected[0]} for the experts' matrices; leave it out")
    return wanted


# Which modules


def _names(targets: str | list[str]) -> list[str]:
    """The targets as a list: a string may hold several, separated by commas."""
    parts = targets.split(",") if isinstance(targets, str) else targets
    names = [part.strip() for part in parts if part.strip()]
    if not names:
        raise InputError(
            f"adapter.targets: {targets!r} names nothing; use {ALL_LINEAR}, or names such as q_proj, v_proj"
        )
    if ALL_LINEAR in names and len(names) > 1:
        raise InputError(f"adapter.targets: {ALL_LINEAR} stands for all of them; use it alone, or names without it")
    return names


def _all_linear(model: "PreTrainedModel", options: AdapterOptions) -> list[str]:
    """The dense linear layers: those in a numbered layer, but for the output head and what is left out."""
    linear = _linear_in_layers(model, options)
    redirected, passed = _left_out(model, linear)
    found = [name for name in linear if name not in redirected | passed]
    if not found:
        raise InputError(
            f"adapter.targets: {ALL_LINEAR} matches nothing in {type(model).__name__}; name the modules to adapt"
        )
    return found


def _linear_in_layers(model: "PreTrainedModel", options: AdapterOptions) -> list[str]:
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    return [
        name
        for name in _adaptable(model, options)
        if _is_linear(modules[name]) and modules[name] is not head and re.search(r"\.\d+\.", name)
    ]


def _left_out(model: "PreTrainedModel", linear: list[str]) -> tuple[set[str], set[str]]:
    """Which of the dense linear layers peft takes for experts, and which a state-space layer's kernels pass by."""
    passed = passed_by(model).intersection(linear)
    return set(_taken_for_experts(model, [name for name in linear if name not in passed])), passed


def left_out(model: "PreTrainedModel", options: AdapterOptions) -> Decision | None:
    """What of the dense linear layers ``all-linear`` leaves out, and why; None where it takes all, or isn't asked for.

    ``model``: not wrapped by peft; its weights may be meta tensors.
    """
    if options.kind != "lora" or _names(options.targets) != [ALL_LINEAR]:
        return None
    redirected, passed = _left_out(model, _linear_in_layers(model, options))
    told = [
        f"{', '.join(sorted(set(map(group_name, names))))}, {why}"
        for names, why in (
            (redirected, "which peft takes for the experts"),
            (passed, "whose adapters the kernels of state-space layers pass by"),
        )
        if names
    ]
    return Decision("adapters", False, f"{ALL_LINEAR} leaves out {'; and '.join(told)}") if told else None


def _adaptable(model: "PreTrainedModel", options: AdapterOptions) -> list[str]:
    """Names of the modules that may get an adapter: linear or embedding, not routed, not trained whole."""
    from torch import nn

    routed = _routed(model)
    return [
        name
        for name, module in model.named_modules()
        if (_is_linear(module) or isinstance(module, nn.Embedding))
        and name not in routed
        and not any(_lies_in(name, saved) for saved in options.modules_to_save)
    ]


def _taken_for_experts(model: "PreTrainedModel", names: list[str]) -> list[str]:
    """Those of the modules that peft, which is asked, would turn into adapters on the experts, if there are any."""
    if not _expert_roots(model):
        return []
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[*names, *FUSED_PAIRS])
    convert_peft_config_for_transformers(config, model, conversions=None)
    return [name for name in names if name not in config.target_modules]


def check_adapter(model: "PreTrainedModel", options: AdapterOptions, new_tokens: Sequence[int] = ()) -> None:
    """Raises ``InputError`` for a target or a ``modules_to_save`` that matches nothing, ``experts`` or ``router`` on a
    model without them, a rank that no matrix can have, and for a target whose rows of ``new_tokens`` are trained;
    weights may be meta tensors.
    """
    _check_saved(model, options.modules_to_save)
    _check_rank(model, options)
    rows = trainable_rows(model, new_tokens, options.modules_to_save) or {}
    both = [name for name in resolve_targets(model, options) if name in rows]
    if both:
        raise InputError(
            f"adapter.targets: {_leaf(both[0])!r} has its new tokens' rows trained, and takes no adapter beside them; "
            f"leave it out, or train it whole: adapter.modules_to_save: [{_leaf(both[0])}]"
        )


def _check_rank(model: "PreTrainedModel", options: AdapterOptions) -> None:
    """Raises ``InputError`` for a rank that no adapted matrix can have: beyond the smaller side of the largest one.

    Smaller matrices may get a higher rank than they can use, as in peft: keys of few heads beside wide MLPs.
    """
    linear, stacks = _routed_targets(model, options)
    dense = [_sides(model.get_submodule(name)) for name in (*resolve_targets(model, options), *linear)]
    most = max(min(sides) for sides in (*dense, *(model.get_parameter(name).shape[-2:] for name in stacks)))
    if options.rank > most:
        raise InputError(
            f"adapter.rank: {options.rank:,} > {most:,}, the smaller side of the largest matrix that gets an adapter: "
            f"more than a matrix of full rank can learn; set it to at most {most:,}, or adapter.kind: none to train "
            "all weights"
        )


def _sides(module: "nn.Module") -> tuple[int, ...]:
    """Rows and columns of a matrix, also of one in four bits, whose packed codes have another shape."""
    from torch import nn

    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    return tuple(module.get_parameter("weight").shape)


def _routed_targets(model: "PreTrainedModel", options: AdapterOptions) -> tuple[list[str], list[str]]:
    """Modules and parameters of experts and routers that get an adapter, as ``options`` asks for."""
    modules: list[str] = []
    parameters: list[str] = []
    for asked, key, what, roots in (
        (options.experts, "experts", "experts", _expert_roots(model)),
        (options.router, "router", "router", _routers(model)),
    ):
        if not asked:
            continue
        linear, stacks = _inside(model, roots)
        if not linear and not stacks:
            raise InputError(f"adapter.{key}: {type(model).__name__} has no {what} to adapt; set it to false")
        modules += linear
        parameters += stacks
    if parameters and options.dropout:
        raise InputError(
            f"adapter.dropout: {options.dropout:g} can't be had on experts or routers that are bare parameters; "
            f"set it to 0.0"
        )
    return modules, parameters


def _inside(model: "PreTrainedModel", roots: list[str]) -> tuple[list[str], list[str]]:
    """Linear modules in ``roots``, and matrices or stacks of them that are parameters of their own."""
    linear: list[str] = []
    stacks: list[str] = []
    for root in roots:
        for name, module in model.get_submodule(root).named_modules(prefix=root):
            if _is_linear(module):
                linear.append(name)
            else:
                own = module.named_parameters(prefix=name, recurse=False)
                stacks += [key for key, value in own if value.ndim >= 2 and not key.endswith("bias")]
    return linear, stacks


def _is_linear(module: "nn.Module") -> bool:
    """A matrix product: ``nn.Linear`` (bitsandbytes' are subclasses), or GPT-2's transposed one."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _routed(model: "nn.Module") -> set[str]:
    """Names of all modules that belong to experts or to a router."""
    modules = dict(model.named_modules())
    roots = _expert_roots(model)
    blocks = {name.rpartition(".")[0] for name in roots}
    roots += [name for name in modules if _routes(name, blocks)]
    return {name for name in modules if any(name == root or name.startswith(f"{root}.") for root in roots)}


def _expert_roots(model: "nn.Module") -> list[str]:
    """Names of the modules that hold a layer's experts."""
    return [name for name, module in model.named_modules() if _holds_experts(name, module)]


def _routers(model: "nn.Module") -> list[str]:
    """Names of the modules that choose experts; the gate of a shared expert scales it, and chooses nothing."""
    blocks = {name.rpartition(".")[0] for name in _expert_roots(model)}
    return [name for name, _ in model.named_modules() if _routes(name, blocks) and _leaf(name) != "shared_expert_gate"]


def _holds_experts(name: str, module: "nn.Module") -> bool:
    own_class = type(module).__name__
    return _leaf(name) == "experts" or (own_class.endswith("Experts") and "Shared" not in own_class)


def _routes(name: str, blocks: set[str]) -> bool:
    """Whether a module chooses experts; ``gate`` alone says so only beside experts."""
    leaf = _leaf(name)
    return leaf in ("router", "shared_expert_gate") or (leaf == "gate" and name.rpartition(".")[0] in blocks)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _ends_with(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _lies_in(module: str, target: str) -> bool:
    """Whether the module is one that ``target`` names, or lies inside one."""
    return _ends_with(module, target) or f".{target}." in f".{module}."


# What is wrong


def _check_saved(model: "nn.Module", names: list[str]) -> None:
    """``InputError`` for a ``modules_to_save`` that matches no module."""
    modules = [name for name, _ in model.named_modules() if name]
    for wanted in names:
        if not any(_ends_with(name, wanted) for name in modules):
            raise InputError(f"adapter.modules_to_save: {wanted!r} matches no module; {_nearest(wanted, modules)}")


def _no_match(model: "nn.Module", target: str, candidates: list[str]) -> str:
    """Why a target matches nothing that can be adapted, and what to write instead."""
    matching = {name: module for name, module in model.named_modules() if name and _ends_with(name, target)}
    nearest = _nearest(target, candidates)
    if not matching:
        parameters = [name for name, _ in model.named_parameters() if _ends_with(name, target)]
        what = f"is a parameter ({parameters[0]}), not a module" if parameters else "matches no module"
    elif _routed(model).issuperset(matching):
        what = "belongs to the experts or their router: adapter.experts and adapter.router say whether they are adapted"
    elif any(_is_linear(module) for module in matching.values()):
        what = "is trained whole already (adapter.modules_to_save)"
    else:
        what = f"is a {type(next(iter(matching.values()))).__name__}, and adapters go on linear layers and embeddings"
    return f"adapter.targets: {target!r} {what}; {nearest}"


def _nearest(wanted: str, names: list[str]) -> str:
    """The remedy: the nearest names there are, and all of them by their last part."""
    leaves = list(dict.fromkeys(_leaf(name) for name in names if not _leaf(name).isdigit()))
    close = get_close_matches(_leaf(wanted), leaves, n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    more = f", ... ({len(leaves)} in all)" if len(leaves) > SHOWN_NAMES else ""
    return f"{hint}there is {', '.join(leaves[:SHOWN_NAMES])}{more}"
