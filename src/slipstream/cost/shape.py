"""A model's sizes, read off its configuration: what every prediction starts from.

Any transformers configuration will do, as an object or as the plain mapping of a ``config.json``; families name the
same size differently, so each is looked up under all its names. The price is a table of names to keep; the
alternative, building the model without storage and walking its modules, is exact for every family and needs torch
(``slipstream plan`` does that too, for what it counts).

    embedding [V, h] → layers × { attention: q, k, v, o   mlp: gate, up, down   or experts × (gate, up, down) } → head
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import InputError

NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "key_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "inner": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "chosen": ("num_experts_per_tok", "top_k"),
}
"""Each size under all the names that configurations have for it."""
PLAIN_MLP = frozenset(
    {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "nemotron", "opt"}
    | {"persimmon", "phi", "starcoder2", "xglm"}
)
"""Families whose MLP has two matrices instead of a gate, an up and a down projection."""
FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
"""Families with a norm after each block besides the one before it."""
NORM_BEHIND = FOUR_NORMS | {"olmo2", "olmo3"}
"""Families with a norm behind the MLP, whose backward needs the MLP's output."""
HEAD_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2", "olmo3", "olmoe"})
"""Families that normalise queries and keys."""

MLP = frozenset({"gate_proj", "up_proj", "down_proj", "fc1", "fc2"})
"""An MLP's matrices, by their names here."""


@dataclass(frozen=True)
class Matrix:
    """One linear layer."""

    name: str
    inputs: int
    outputs: int

    @property
    def parameters(self) -> int:
        """Its weights, without a bias."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer, each with a gate, an up and a down projection."""

    count: int
    chosen: int
    """Experts that a token goes to."""
    hidden: int
    inner: int

    @property
    def parameters(self) -> int:
        """Weights of all experts."""
        return self.count * 3 * self.hidden * self.inner

    @property
    def active(self) -> int:
        """Weights that one token is multiplied with."""
        return self.chosen * 3 * self.hidden * self.inner


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    matrices: tuple[Matrix, ...]
    """Dense linear layers; of experts, the shared ones and the router."""
    window: int | None
    """How many tokens back attention reaches; None: to the document's first."""
    experts: Experts | None

    @property
    def mlp(self) -> tuple[Matrix, ...]:
        """The matrices of its dense MLP; of a mixture's layer, those of shared experts."""
        return tuple(matrix for matrix in self.matrices if matrix.name in MLP)

    @property
    def parameters(self) -> int:
        """Weights of all its matrices."""
        return sum(matrix.parameters for matrix in self.matrices) + (self.experts.parameters if self.experts else 0)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a causal language model; widths in elements."""

    kind: str
    """transformers' model type."""
    hidden: int
    query: int
    """Width of all queries together: heads × head width."""
    key: int
    value: int
    """Width of all values together."""
    out: int
    """Width of what attention gives to its output projection."""
    heads: int
    vocabulary: int
    tied: bool
    """Whether the output head is the embedding."""
    norms: int
    """Norms over the hidden width in a layer."""
    head_norms: bool
    """Whether queries and keys are normalised."""
    inner: int
    """Width of the widest dense MLP; 0 without one."""
    layers: tuple[Layer, ...]
    parameters: int
    """All weights; biases are left out."""
    softcapped: bool = False
    """Whether the logits have a soft cap."""
    norm_behind: bool = False
    """Whether a norm reads what the MLP gives."""

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """The shape that a configuration describes. Raises ``InputError`` naming what it lacks."""
        if (reason := unmodelled(config)) is not None:
            raise InputError(f"model: {reason}")
        read = _Reader.of(config)
        attention, widths = _attention(read)
        layers = tuple(_layer(read, index, attention) for index in range(read.size("layers")))
        kind, hidden, vocabulary = read.kind, read.size("hidden"), read.size("vocab_size")
        tied = bool(read.get("tie_word_embeddings", True))
        norms = 4 if kind in FOUR_NORMS else 2
        dense = [m.outputs for layer in layers for m in layer.matrices if m.name in ("up_proj", "fc1")]
        return cls(
            kind=kind,
            hidden=hidden,
            query=widths[0],
            key=widths[1],
            value=widths[2],
            out=widths[3],
            heads=read.size("heads"),
            vocabulary=vocabulary,
            tied=tied,
            norms=norms,
            head_norms=kind in HEAD_NORMS or bool(read.get("use_qk_norm", False)),
            inner=max(dense, default=0),
            layers=layers,
            parameters=vocabulary * hidden * (1 if tied else 2)
            + sum(layer.parameters + norms * hidden for layer in layers)
            + hidden,
            softcapped=bool(read.get("final_logit_softcapping")),
            norm_behind=kind in NORM_BEHIND,
        )

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def head(self) -> int:
        """Weights of the output head, its own or the embedding's."""
        return self.vocabulary * self.hidden

    @property
    def embedding(self) -> int:
        """Weights of the input embedding that no matrix product touches; 0 where the head shares them."""
        return 0 if self.tied else self.head

    @property
    def dense(self) -> int:
        """Weights of the dense linear layers in the decoder."""
        return sum(matrix.parameters for layer in self.layers for matrix in layer.matrices)

    @property
    def routed(self) -> int:
        """Weights of all experts of all layers."""
        return sum(layer.experts.parameters for layer in self.layers if layer.experts)

    @property
    def active_experts(self) -> int:
        """Expert weights that one token is multiplied with, over all layers."""
        return sum(layer.experts.active for layer in self.layers if layer.experts)

    def adapted(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of every dense linear layer but routers: where ``all-linear`` puts an adapter."""
        return tuple((m.inputs, m.outputs) for layer in self.layers for m in layer.matrices if m.name != "router")


def unmodelled(config: Any) -> str | None:
    """Why a model's layers are none that the cost model knows (recurrent ones: Mamba, RWKV), or None."""
    read = _Reader.of(config)
    if read.get("heads") is not None:
        return None
    return (
        f"its configuration (type {read.kind!r}) names no attention heads, and of other layers activations and time "
        "aren't predicted"
    )


@dataclass(frozen=True)
class _Reader:
    values: Mapping[str, Any]

    @classmethod
    def of(cls, config: Any) -> "_Reader":
        if hasattr(config, "get_text_config"):
            text = config.get_text_config()
            known = {name: getattr(text, name) for names in NAMES.values() for name in names if hasattr(text, name)}
            config = {**text.to_dict(), **known}
        inner = config.get("text_config")
        return cls({**config, **inner} if isinstance(inner, Mapping) else config)

    @property
    def kind(self) -> str:
        return str(self.values.get("model_type", "unknown"))

    def get(self, name: str, default: Any = None) -> Any:
        """The first value that is there and not null, under any of the names."""
        found = (self.values.get(alias) for alias in NAMES.get(name, (name,)))
        return next((value for value in found if value is not None), default)

    def size(self, name: str) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            names = " or ".join(NAMES.get(name, (name,)))
            raise InputError(
                f"model: its configuration (type {self.kind!r}) has {value!r} for {names}, a whole number is needed; "
                "complete config.json, or use a causal language model"
            )
        return value


def _attention(read: _Reader) -> tuple[tuple[Matrix, ...], tuple[int, int, int, int]]:
    """The attention's matrices, and the widths of queries, keys, values and outputs."""
    hidden, heads = read.size("hidden"), read.size("heads")
    if read.get("kv_lora_rank"):
        return _latent_attention(read, hidden, heads)
    width = read.get("head_dim") or hidden // heads
    key_heads = 1 if read.get("multi_query") and not read.get("new_decoder_architecture") else None
    query, key = heads * width, (key_heads or read.get("key_heads") or heads) * width
    shapes = {"q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden)}
    return tuple(Matrix(name, *shape) for name, shape in shapes.items()), (query, key, key, query)


def _latent_attention(read: _Reader, hidden: int, heads: int) -> tuple[tuple[Matrix, ...], tuple[int, int, int, int]]:
    """DeepSeek's: keys and values are made from a narrow latent, queries too where ``q_lora_rank`` is set."""
    latent, narrow = read.size("kv_lora_rank"), read.get("q_lora_rank")
    rotary, plain, width = read.size("qk_rope_head_dim"), read.size("qk_nope_head_dim"), read.size("v_head_dim")
    query, value = heads * (rotary + plain), heads * width
    queries = (
        (Matrix("q_a_proj", hidden, narrow), Matrix("q_b_proj", narrow, query))
        if narrow
        else (Matrix("q_proj", hidden, query),)
    )
    others = (
        Matrix("kv_a_proj_with_mqa", hidden, latent + rotary),
        Matrix("kv_b_proj", latent, heads * plain + value),
        Matrix("o_proj", value, hidden),
    )
    return (*queries, *others), (query, query, value, value)


def _layer(read: _Reader, index: int, attention: tuple[Matrix, ...]) -> Layer:
    hidden = read.size("hidden")
    experts = _experts(read, index)
    window = _window(read, index)
    if experts is None:
        return Layer((*attention, *_mlp(read, hidden, read.get("inner") or 4 * hidden)), window, None)
    shared = read.get("shared_expert_intermediate_size") or read.get("n_shared_experts", 0) * experts.inner
    more = _mlp(read, hidden, shared) if shared else ()
    return Layer((*attention, Matrix("router", hidden, experts.count), *more), window, experts)


def _mlp(read: _Reader, hidden: int, inner: int) -> Iterator[Matrix]:
    if read.kind in PLAIN_MLP:
        yield from (Matrix("fc1", hidden, inner), Matrix("fc2", inner, hidden))
        return
    yield from (Matrix(name, hidden, inner) for name in ("gate_proj", "up_proj"))
    yield Matrix("down_proj", inner, hidden)


def _experts(read: _Reader, index: int) -> Experts | None:
    """The experts of layer ``index``; None where it is dense."""
    count = read.get("experts")
    dense = index < read.get("first_k_dense_replace", 0) or index in read.get("mlp_only_layers", ())
    if not count or count < 2 or dense or (index + 1) % (read.get("decoder_sparse_step") or 1):
        return None
    inner = read.get("moe_intermediate_size") or read.size("inner")
    return Experts(count, read.size("chosen"), read.size("hidden"), inner)


def _window(read: _Reader, index: int) -> int | None:
    window, kinds = read.get("sliding_window"), read.get("layer_types")
    if not isinstance(window, int) or read.get("use_sliding_window", True) is False:
        return None
    if kinds is None:
        return window
    return window if index < len(kinds) and kinds[index] == "sliding_attention" else None
