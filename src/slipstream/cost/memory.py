"""Device and host memory of a step at its peak, by part.

What tensors a step holds follows from the code, not from measuring: weights, adapters and optimizer state are counted,
activations are what autograd saves in transformers' decoder layers (RMSNorm in float32, rotary positions, gated MLP,
an adapter's input each). Two moments can be the peak and both are looked at: the loss, when every layer's activations
are kept, and the last layer's backward, when all gradients are there. The allocator's own losses (fragments, rounding)
come on top; the margin for them is in ``room``.

h hidden, q query, k key, v value width, o width of attention's output, i width of the MLP, r rank; T tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.cost.estimate import LOSS_CHUNK, dense_mask_bytes
from slipstream.cost.hardware import Device
from slipstream.cost.job import BYTES, NF4_BYTES, Job
from slipstream.cost.shape import Layer, Matrix

LIBRARIES = 40 * 2**20
"""Workspaces that cuBLAS takes from the allocator: 32 MiB on Hopper and newer, and what else is small."""
CONTEXT = 600 * 2**20
"""What the CUDA context and loaded kernels take of a card, outside the allocator."""
ROOM = 0.94
"""Share of what is free that a plan may fill: the allocator reserves more than it hands out."""
SOFTCAPPED = 29.0
"""Bytes for each logit of a chunk that an eager loss with a soft cap holds behind a frozen head: tanh, slope and what
is put together from them. Counted on a step without storage."""
OPTIMIZER_BYTES: Mapping[str, float] = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256)}
"""Bytes of optimizer state for each trained parameter: two float32 moments (Loshchilov and Hutter 2019), or two of one
byte with a float32 scale for each 256 (Dettmers et al. 2022, 8-bit optimizers, section 2)."""


@dataclass(frozen=True)
class Part:
    """One part of memory."""

    name: str
    bytes: float
    what: str


@dataclass(frozen=True)
class Memory:
    """A step's memory at its peak."""

    device: tuple[Part, ...]
    host: tuple[Part, ...]

    @property
    def device_bytes(self) -> float:
        """The peak that the allocator will show."""
        return sum(part.bytes for part in self.device)

    @property
    def host_bytes(self) -> float:
        """Host memory beyond the process itself."""
        return sum(part.bytes for part in self.host)


def memory(job: Job) -> Memory:
    """The memory of one step of ``job``, by part, at the moment of its peak."""
    moments = [_parts(job, moment) for moment in ("loss", "backward", "recompute", "end")]
    peak = max(moments, key=lambda parts: sum(part.bytes for part in parts))
    return Memory(tuple(part for part in peak if part.bytes), tuple(part for part in host_parts(job) if part.bytes))


def room(device: Device, free: float | None = None) -> float:
    """Bytes that a step may fill: of what is ``free`` now, else of the device's memory less its context."""
    if free is None:
        free = device.memory_bytes - (CONTEXT if device.kind == "cuda" else 0)
    return ROOM * free


def _parts(job: Job, moment: str) -> list[Part]:
    """The parts while the loss is computed, in the last layer's backward, in that of the last layer that is recomputed,
    or at the end, in the first layer's.
    """
    end = moment == "end"
    return [
        *held_parts(job, end=end),
        Part("casts", cast_bytes(job, ended=end), f"trained weights in {job.compute}"),
        Part("activations", kept_bytes(job, moment), _kept_words(job)),
        Part("reload buffers", reload_bytes(job, moment), f"{job.buffers}, each for a layer's input"),
        Part("attention mask", mask_bytes(job), "dense, T²"),
        Part("loss" if moment == "loss" else "backward", _working(job, moment), _working_words(job, moment)),
        Part("batch", job.tokens * 36.0, "token ids, labels, positions, segments"),
        Part("libraries", LIBRARIES, "matrix product workspaces"),
    ]


def held_parts(job: Job, *, end: bool = True) -> list[Part]:
    """What a step holds whatever its layers compute: weights, gradients (all of them at its ``end``), optimizer."""
    return [
        Part("weights", weight_bytes(job), _weights_words(job)),
        Part("adapters", 0 if job.full else 4.0 * job.trained, f"{job.trained:,} float32 masters"),
        Part("gradients", _gradients(job, end=end), _gradients_words(job, end=end)),
        Part("optimizer", state_bytes(job), job.optimizer + (", float32 masters" if _has_masters(job) else "")),
    ]


def _gradients(job: Job, *, end: bool) -> float:
    """All gradients at the end, and before if batches accumulate; a captured step has a buffer for each all the time,
    and the graph's own besides at the end.
    """
    return _gradient_copies(job, end=end) * gradient_bytes(job)


def _gradient_copies(job: Job, *, end: bool) -> int:
    return (end or job.accumulate > 1) + (job.mode == "captured")


def _gradients_words(job: Job, *, end: bool) -> str:
    each = f"{job.trained:,} in {job.weights if job.full else 'float32'}"
    twice = _gradient_copies(job, end=end) > 1
    return f"{each}, once more in the graph" if twice else each


def _working(job: Job, moment: str) -> float:
    """What is computed with at this moment."""
    if moment == "loss":
        return loss_workspace(job)
    layer = max(job.shape.layers, key=lambda one: layer_bytes(job, one))
    again = moment == "recompute" or (moment == "end" and job.layers.kept < job.layers.layers)
    if again:
        working = recomputed_layer_bytes(job, layer)
    else:
        working = job.tokens * backward_bytes(job, layer, _inner_share(job, layer, recomputed=False))
    if moment == "end" and job.full and job.shape.tied:  # the embedding's gradient comes last, beside the head's
        working = max(working, (BYTES[job.weights] + job.itemsize) * job.shape.head)
    return working


def _weights_words(job: Job) -> str:
    if job.nf4:
        return f"linear layers in NF4, the rest in {job.weights}"
    return f"{job.shape.parameters:,} in {job.weights}"


def _kept_words(job: Job) -> str:
    counts = job.layers
    named = {"kept": counts.kept, "recomputed": counts.recomputed, "offloaded": counts.offloaded}
    return ", ".join(f"{count} layer{'s' * (count > 1)} {name}" for name, count in named.items() if count)


def _working_words(job: Job, moment: str) -> str:
    if moment != "loss":
        return "one layer's gradients" + (" and recomputed activations" if moment == "recompute" else "")
    logits = f"logits of {min(job.tokens, LOSS_CHUNK):,} tokens" if job.chunked_loss else "logits of all tokens"
    return logits if _gradient_copies(job, end=False) else f"{logits}; no gradients yet"


def weight_bytes(job: Job) -> float:
    """Bytes of the base weights. In NF4 only the decoder's dense linear layers are; experts, embeddings, head and norms
    keep their dtype.
    """
    size = BYTES[job.weights]
    total = job.shape.parameters * size
    return total - job.shape.dense * (size - NF4_BYTES) if job.nf4 else total


def gradient_bytes(job: Job) -> float:
    """Bytes of all gradients, in the dtype of what is trained; adapters are float32."""
    return (BYTES[job.weights] if job.full else 4.0) * job.trained


def state_bytes(job: Job) -> float:
    """Bytes of the optimizer: its state, and where half-precision weights are trained whole, their float32 masters."""
    return (optimizer_bytes(job.optimizer) + (4.0 if _has_masters(job) else 0.0)) * job.trained


def optimizer_bytes(name: str) -> float:
    """Bytes of state for each trained parameter, by the optimizer's name."""
    return OPTIMIZER_BYTES["adamw8bit" if "8bit" in name else "adamw"]


def _has_masters(job: Job) -> bool:
    return job.full and job.weights != "float32" and "8bit" not in job.optimizer


def cast_bytes(job: Job, *, ended: bool) -> float:
    """Copies of float32 trained weights in the dtype that is computed in; autocast keeps them from forward to backward.

    None where nothing has to be cast.
    """
    trained_in = job.weights if job.full else "float32"
    if job.compute == trained_in or (ended and job.full):
        return 0.0
    return job.itemsize * job.trained


def kept_bytes(job: Job, moment: str = "loss") -> float:
    """Activations on the device: all that kept layers saved, and the input of each that is recomputed.

    Kept layers come last in the model, so theirs are gone when the first of the others is recomputed; at the end only
    the first layer's are left. Offloaded inputs wait in host memory.
    """
    counts, layers = job.layers, job.shape.layers
    if moment == "end":
        return kept_layer_bytes(job, layers[0]) if counts.kept == counts.layers else input_bytes(job)
    inputs = counts.recomputed * input_bytes(job)
    if moment == "recompute":
        return inputs if counts.kept < counts.layers else 0.0
    kept = layers[len(layers) - counts.kept :]
    return inputs + sum(kept_layer_bytes(job, layer) for layer in kept)


def input_bytes(job: Job) -> float:
    """Bytes of one layer's input: T·h in the dtype of the residual stream."""
    return job.tokens * job.shape.hidden * stream_bytes(job)


def stream_bytes(job: Job) -> float:
    """Bytes of an element of the residual stream: the weights' dtype, which embeddings and norms give."""
    return BYTES[job.weights]


def reload_bytes(job: Job, moment: str = "recompute") -> float:
    """Device buffers into which offloaded inputs are reloaded: from the first layer on that is recomputed."""
    return job.buffers * input_bytes(job) if job.layers.offloaded and moment in ("recompute", "end") else 0.0


def host_parts(job: Job) -> list[Part]:
    """Host memory that a step needs: the inputs of offloaded layers, in pinned memory of exact size."""
    return [Part("offloaded activations", job.layers.offloaded * input_bytes(job), "pinned, each layer's input")]


def loss_workspace(job: Job) -> float:
    """What the loss holds at most, beside the activations (``train/loss.py``).

    For each logit of a chunk: with a frozen head the half-precision product, its float32 copy and the log-softmax of
    that, in whose place the gradient is made (in float32 the product needs no copy), and more with a soft cap; fused to
    the product and its gradient in compiled steps; with one that is trained three float32 tensors in the backward
    (log-softmax, its gradient, that of the logits), the head's gradient and its sum. For all tokens the gradient of
    what the head reads; without chunks all logits and their gradient too.
    """
    whole = 0.0 if job.chunked_loss else 2 * job.itemsize * job.tokens
    features = 2 * job.itemsize * job.tokens * job.shape.hidden
    each = 12.0
    if job.head_once:
        product = 0.0 if job.compute == "float32" else job.itemsize  # in float32 no copy is made of it
        capped = job.shape.softcapped and not job.fused
        each = SOFTCAPPED if capped else product + (4.0 if job.fused else 8.0)
    summed = BYTES[job.weights] if job.tokens > LOSS_CHUNK else 0.0
    head = (job.itemsize + summed) * job.shape.head if job.full else 0.0
    return job.shape.vocabulary * (each * min(job.tokens, LOSS_CHUNK) + whole) + features + head


def mask_bytes(job: Job) -> float:
    """The dense masks of all distinct windows, where attention needs them."""
    windows = {layer.window for layer in job.shape.layers}
    return dense_mask_bytes(job.tokens, int(job.itemsize), len(windows)) if job.attention == "sdpa" else 0.0


def _inner_share(job: Job, layer: Layer, *, recomputed: bool) -> float:
    """The share of a dense MLP's activations that exists at once while its layer's backward is at work: a tile's."""
    if job.tile is None or layer.experts or not (recomputed or job.tiles != "auto"):
        return 1.0
    return job.tile / job.tokens


def kept_layer_bytes(job: Job, layer: Layer) -> float:
    """Bytes that one kept layer saves; of an MLP in tiles nothing but what it reads."""
    tiled = job.tile is not None and job.tiles != "auto" and not layer.experts
    return job.tokens * layer_bytes(job, layer, 0.0 if tiled else 1.0)


def recomputed_layer_bytes(job: Job, layer: Layer) -> float:
    """Bytes of one recomputed layer's activations and gradients while it is at work."""
    inner = _inner_share(job, layer, recomputed=True)
    return job.tokens * (layer_bytes(job, layer, inner) + backward_bytes(job, layer, inner))


def layer_bytes(job: Job, layer: Layer, inner: float = 1.0) -> float:
    """Bytes a token that one layer saves for its backward; ``inner``: the share of the MLP's own that is there.

    A compiled layer saves no more than an eager one: what the backward can make again is not kept.
    """
    dense = _adapters_saved(job, layer, inner) + _mlp_saved(job, layer, inner)
    eager = _attention_saved(job) + _norms_saved(job) + dense
    return min(eager, _fused_layer(job, layer, inner)) if job.fused else eager


def _attention_saved(job: Job) -> float:
    """Queries, keys, values and output as the kernel keeps them, and a float32 log-sum a head.

    ``sdpa`` repeats keys and values for grouped heads first, and keeps them so.
    """
    shape = job.shape
    keys = shape.query + shape.out if job.attention == "sdpa" else shape.key + shape.value
    return job.itemsize * (shape.query + keys + shape.out) + 4 * shape.heads


def _norms_saved(job: Job) -> float:
    """A float32 input of each norm (as it is, where norms are one kernel); with trained weights also what the weight is
    multiplied with.
    """
    shape = job.shape
    width = shape.norms * shape.hidden + (shape.query + shape.key if shape.head_norms else 0)
    return width * (job.itemsize if job.one_kernel_norms else 4) * (2 if job.full else 1)


def _adapters_saved(job: Job, layer: Layer, inner: float) -> float:
    """Inputs of linear layers: a frozen one keeps none, its adapter does, and layers that read the same keep it once;
    what the output projection reads is the attention's own. Where something is cast for each layer alone (float32
    weights under autocast, peft's own adapters), each keeps its own copy.
    """
    matrices = layer.matrices if job.full else tuple(m for m in layer.matrices if m.name != "router" and job.adapted)
    low = 0 if job.full else job.rank * len(matrices)
    cast_each = job.compute != "float32" and (job.weights == "float32" if job.full else not job.half_adapters)
    if cast_each:
        each = (_read(m, inner) for m in matrices if not (job.full and m.name == "o_proj"))
        return job.itemsize * (sum(each) + low)
    read = {_source(m.name): _read(m, inner) for m in matrices if m.name != "o_proj"}
    return job.itemsize * (sum(read.values()) + low)


def _read(matrix: Matrix, inner: float) -> float:
    """Width of what a linear layer reads: of the MLP's inner activations a share."""
    return matrix.inputs * (inner if matrix.name in ("down_proj", "fc2") else 1.0)


def _source(name: str) -> str:
    """Which tensor a linear layer reads."""
    groups = {"q_proj": "attention", "k_proj": "attention", "v_proj": "attention", "gate_proj": "mlp", "up_proj": "mlp"}
    return groups.get(name, name)


def _mlp_saved(job: Job, layer: Layer, inner: float) -> float:
    """The gate before and after its activation, and up; the same for each expert chosen (six widths in gpt-oss, whose
    activation is clamped), and its output, which the router's weight multiplies. An expert with an adapter, or trained,
    keeps the inputs of its products too.
    """
    saved = 3 * job.itemsize * inner * sum(m.outputs for m in layer.matrices if m.name in ("up_proj", "fc1"))
    if layer.experts:
        hidden, width = layer.experts.hidden, layer.experts.inner
        each = (6 if job.shape.kind == "gpt_oss" else 3) * width + hidden
        inputs = hidden + width if job.full or job.adapted_experts else 0
        saved += job.itemsize * layer.experts.chosen * (each + inputs)
    return saved


def _fused_layer(job: Job, layer: Layer, inner: float) -> float:
    """A compiled layer: its cheap elementwise steps are made again in the backward from what kernels must keep."""
    shape = job.shape
    dense = inner * sum(m.outputs for m in layer.matrices if m.name in ("up_proj", "fc1"))
    saved = _attention_saved(job) + job.itemsize * (4 * shape.hidden + 2 * dense)
    if shape.head_norms:
        saved += job.itemsize * (shape.query + shape.key)
    if job.full or job.adapted:
        saved += job.itemsize * (shape.hidden + dense)
    if layer.experts:
        saved += job.itemsize * layer.experts.chosen * (3 * layer.experts.inner + 2 * layer.experts.hidden)
    return saved


def backward_bytes(job: Job, layer: Layer, inner: float = 1.0) -> float:
    """Bytes a token of the gradients that live at once in one layer's backward: the MLP's three (of which ``inner`` is
    there at once), and the ones of a norm, float32 where it is many kernels.
    """
    width = job.shape.inner or (layer.experts.chosen * layer.experts.inner if layer.experts else 0)
    norm = 2 * job.itemsize if job.one_kernel_norms and not job.fused else 16
    return 4 * job.itemsize * inner * width + norm * job.shape.hidden
