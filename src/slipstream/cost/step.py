"""The seconds of one training step, by part.

On the device, parts add up: matrix products at the measured rate, attention, elementwise work at the measured copy
rate, the loss, NF4 unpacking, the optimizer, and for every kernel the few microseconds that even the smallest takes.
The host issues launches meanwhile, from eager layers behind Python and autograd; the longer of the two is the step's
time, since each can run while the other does. Copies of offloaded activations are exposed where they take longer than
the backward they hide under.

The constants under "fitted" were fitted to the measurements of one H200 that ``test_step.py`` and
``test_plan_against_run.py`` in ``tests/cost`` hold the whole against; the rest is counted. The alternative, timing a
few steps and extrapolating, needs the weights loaded.

h hidden, q query, k key, i MLP width; bytes a token and layer unless said otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.cost.ceilings import Ceilings
from slipstream.cost.flops import ATTENTION_BACKWARD, attention_forward, flops, mlp_adapters, mlp_matrices
from slipstream.cost.job import Job
from slipstream.cost.memory import input_bytes, optimizer_bytes
from slipstream.cost.metadata import build_seconds, dynamic_queries
from slipstream.cost.offload import double_buffer_seconds, single_buffer_seconds
from slipstream.cost.shape import Layer

# Fitted
PRODUCTS_SHARE = 0.85
"""Rate of a model's matrix products over that of one large product: sizes differ, and cards throttle under load."""
GROUPED_SHARE = 0.75
"""The same for grouped products of experts, whose groups are small and uneven: 595 of 790 TFLOP/s, in a profile of a
training of gpt-oss-20b's layers on one H200 (4,096 tokens, 4 of 32 experts: 1.37 ms a layer for 0.815 TFLOP in the
forward, and in each of the two products of the backward)."""
ATTENTION_SHARE, HALF_LENGTH = 0.4, 1200
"""Attention reaches 0.4 · l / (l + 1,200) of the matrix product's rate on documents of l tokens: tiles are cut off at
every seam, and short documents fill few of them. (28 layers of Qwen3-0.6B, 256 tokens a document: 8 ms backward.)"""
MASKED_SHARE = 0.25
"""Attention under a dense mask, which skips nothing."""
CPU_ATTENTION_SHARE = 0.5
"""The same on a CPU, whose kernel is nearer to its matrix products (20 to 22 of 31 GFLOP/s, in turns)."""
KERNEL = 3e-6
"""Seconds of the smallest kernel on a card; on a CPU it is what issuing one takes."""
JOINED_SHARE = 4 / 7
"""Tensors read by a layer's seven adapters, a seventh each: queries, keys and values share one, gate and up another
(``model/joined_adapters.py``)."""
UNPACK_SHARE = 0.5
"""Bandwidth of NF4 unpacking over the copy rate: three passes were 7% of a compiled step of Qwen3-14B."""
LOSS_BYTES, FROZEN_LOSS_BYTES, FUSED_LOSS_BYTES = 50, 60, 12
"""Bytes that the chunked cross-entropy moves for each logit: forward, recompute and backward with a head that is
trained; the loss and its gradient in one go with a frozen one; the same in compiled kernels."""
EAGER_OPERATION = 36e-6
"""Host seconds of one kernel in the forward or backward of a layer that isn't compiled: Python, autograd, autocast and
peft beside the launch. Profiles of eager steps show 25 to 45 µs a kernel. It takes the launch's place and is not added
to it: whole steps of Qwen3-0.6B came to 40 µs a kernel on a host that launches in 9 µs (252 ms, plan_h200.json) and to
31 µs on one whose measured launch was 24 µs (245 ms, train_step_qwen3-0.6b.json)."""
STEP_LAUNCHES = 700
"""Launches of an optimizer step beyond the layers': clipping, update, scalars, the loader's copies, and the trainer's
own work on the host expressed in launches."""


@dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step, by part."""

    matmul: float
    """Matrix products of base weights and head."""
    adapters: float
    attention: float
    elementwise: float
    """Norms, rotary positions, activations, residuals, adapters' sums, casts: memory-bound."""
    loss: float
    unpack: float
    """NF4 to the compute dtype, before each use."""
    optimizer: float
    kernels: float
    """The least time of each kernel, summed."""
    exposed: float
    """Copies of offloaded activations that nothing hides."""
    host: float
    """Launches, from Python; in eager layers all that Python does for one."""
    waits: float
    """The host's waits for answers of the device."""
    floor: float
    """The matrix products of base weights and head at the measured rate: no step is faster."""

    @property
    def device(self) -> float:
        """What the device computes and copies."""
        busy = self.matmul + self.adapters + self.attention + self.elementwise + self.loss + self.unpack
        return busy + self.optimizer + self.kernels + self.exposed

    @property
    def total(self) -> float:
        """The step: device or host, whichever takes longer, and the waits between them."""
        return max(self.device, self.host) + self.waits


def step_times(job: Job, rates: Ceilings, *, cpu: bool = False) -> Times:
    """The parts of one optimizer step (``accumulate`` batches and one update) at a device's ``rates``."""
    work, batches = flops(job), job.accumulate
    products = rates.matmul * PRODUCTS_SHARE
    launches = layer_launches(job) * batches
    return Times(
        matmul=batches * ((work.dense + work.head) / products + _expert_seconds(job, work.experts, rates)),
        adapters=batches * work.adapters / products,
        attention=batches * attention_seconds(job, rates, cpu=cpu),
        elementwise=batches * elementwise_bytes(job) / rates.copy,
        loss=batches * _loss_bytes(job) * job.tokens * job.shape.vocabulary / rates.copy,
        unpack=batches * unpack_bytes(job) / (rates.copy * UNPACK_SHARE),
        optimizer=update_bytes(job) / rates.copy,
        kernels=(launches + STEP_LAUNCHES / 4) * (rates.launch if cpu else KERNEL),
        exposed=batches * exposed_seconds(job, rates, cpu=cpu),
        host=0.0 if cpu else _host_seconds(job, launches, rates.launch),
        waits=batches * _queries(job) * rates.sync,
        floor=batches * work.floor / rates.matmul,
    )


def _loss_bytes(job: Job) -> float:
    if not job.head_once:
        return LOSS_BYTES
    return FUSED_LOSS_BYTES if job.fused else FROZEN_LOSS_BYTES


def _host_seconds(job: Job, launches: float, launch: float) -> float:
    """The layers' launches from the host, none where a graph is replayed, and the rest of the step."""
    if job.mode == "captured":
        return STEP_LAUNCHES * launch
    each = launch if job.fused else max(launch, EAGER_OPERATION)
    return launches * each + STEP_LAUNCHES * launch


def _expert_seconds(job: Job, operations: float, rates: Ceilings) -> float:
    """Grouped products, or where that is longer, reading every expert's weights once a pass."""
    weights = 2.0 * job.shape.routed * (job.passes + 1)
    return max(operations / (rates.matmul * GROUPED_SHARE), weights / rates.copy)


def attention_seconds(job: Job, rates: Ceilings, *, cpu: bool = False) -> float:
    """Attention's forward passes and backward at the share of the matrix rate that documents of this length reach."""
    operations = attention_forward(job) * (job.passes + ATTENTION_BACKWARD)
    if cpu or job.attention == "sdpa":
        return operations / (rates.matmul * (CPU_ATTENTION_SHARE if cpu else MASKED_SHARE))
    lengths = np.asarray(job.lengths, dtype=np.float64)
    typical = float((lengths**2).sum() / max(1.0, lengths.sum()))
    return operations / (rates.matmul * ATTENTION_SHARE * typical / (typical + HALF_LENGTH))


def elementwise_bytes(job: Job) -> float:
    """Bytes that memory-bound kernels of all layers move in one batch: forward passes, and the backward at twice; of
    MLPs in tiles, one forward more in each layer that runs one (``tiles.py``).
    """
    each = sum(_eager_bytes(job, layer) if not job.fused else _fused_bytes(job, layer) for layer in job.shape.layers)
    again = _mlp_bytes(job) * job.tiling.again
    return (each * (job.passes + 2) + again) * job.itemsize / 2 * job.tokens


def _mlp_bytes(job: Job) -> float:
    """The part of an average layer's forward that is its MLP: activation and adapters, and each tile's output put in
    its place (4 h).
    """
    shape = job.shape
    inner = sum(_mlp_width(layer) for layer in shape.layers) / shape.depth
    return (6 if job.fused else 10) * inner + _adapter_bytes(job, mlp_adapters(job)) + 4 * shape.hidden


def _adapter_bytes(job: Job, sizes: Sequence[tuple[int, int]]) -> float:
    """What adapters of these inputs and outputs move in one forward, an average layer's share: ``_eager_bytes``."""
    own = job.compute == "float32" or not job.half_adapters
    if job.fused and not own and not job.nf4:
        read, added = 2 * JOINED_SHARE, 2.0
    else:
        read = 2 if job.fused or not own or job.compute == "float32" else 14
        added = (4 if job.half_adapters else 8) if job.fused else (10 if own else 4)
    return sum(read * inputs + added * outputs for inputs, outputs in sizes) / job.shape.depth


def _eager_bytes(job: Job, layer: Layer) -> float:
    """One forward without fusing, each kernel reading and writing memory: a norm 36 (it is upcast; 8 as PyTorch's one
    kernel and the product with its weight), rotary positions 20, a residual 6, the gated activation 10; an adapter
    reads its input (2) and adds itself to the output (4); peft's own casts its input to float32 and back where layers
    compute in half precision (12), and scales and adds (10).
    """
    shape, inner = job.shape, _mlp_width(layer)
    each = 8 if job.one_kernel_norms else 36
    norms = each * (shape.norms * shape.hidden + (shape.query + shape.key if shape.head_norms else 0))
    rotary = 20 * (shape.query + shape.key)
    adapters = _adapter_bytes(job, job.adapted)
    return norms + rotary + 12 * shape.hidden + 10 * inner + adapters + _routed_width(layer)


def _fused_bytes(job: Job, layer: Layer) -> float:
    """One forward of a compiled layer: norms and residuals once through memory (8 each), rotary and head norms
    together (4), the gated activation (6); an adapter's input, read once by those that share it (2), and its output,
    to which the weight's product is added (2; 4 on four-bit weights, 8 of peft's own).
    """
    shape, inner = job.shape, _mlp_width(layer)
    stream = 8 * shape.norms * shape.hidden
    adapters = _adapter_bytes(job, job.adapted)
    return stream + 4 * (shape.query + shape.key) + 6 * inner + adapters + _routed_width(layer)


def _mlp_width(layer: Layer) -> int:
    return sum(m.outputs for m in layer.matrices if m.name in ("up_proj", "fc1"))


def _routed_width(layer: Layer) -> float:
    """Of experts: rows gathered and put back (12 h) and their activation (10 i), for each expert chosen."""
    experts = layer.experts
    return experts.chosen * (12 * experts.hidden + 10 * experts.inner) if experts else 0.0


def unpack_bytes(job: Job) -> float:
    """Bytes that NF4 moves: half a byte read and two written for each weight, in every pass and the backward; of MLPs
    in tiles, once a tile.
    """
    if not job.nf4:
        return 0.0
    tiled = sum(m.parameters for m in mlp_matrices(job)) / job.shape.depth * job.tiling.extra(1)
    return 2.5 * ((job.passes + 1) * job.shape.dense + tiled)


def update_bytes(job: Job) -> float:
    """Bytes of clipping and the update: the gradient read twice, weight and state read and written."""
    return job.trained * (8.0 + 8.0 + 2 * optimizer_bytes(job.optimizer))


def exposed_seconds(job: Job, rates: Ceilings, *, cpu: bool = False) -> float:
    """Reload time of offloaded layers that no backward hides: what the schedule takes, less the computing in it."""
    layers = job.layers.offloaded
    if not layers or not rates.to_device:
        return 0.0
    copy, backward = reload_seconds(job, rates), layer_backward_seconds(job, rates, cpu=cpu)
    schedule = single_buffer_seconds if job.buffers < 2 else double_buffer_seconds
    return schedule(layers, copy, backward) - layers * backward


def reload_seconds(job: Job, rates: Ceilings) -> float:
    """c: one layer's input over the link."""
    return input_bytes(job) / rates.to_device if rates.to_device else 0.0


def layer_backward_seconds(job: Job, rates: Ceilings, *, cpu: bool = False) -> float:
    """g: one layer's backward with its recompute, on average."""
    kept = replace(job, activations="recompute", split=None, accumulate=1)
    times = step_times(kept, rates, cpu=cpu)
    layers = times.matmul - flops(kept).head / (rates.matmul * PRODUCTS_SHARE)
    share = 2 / 3  # of the three passes, recompute and backward
    return share * (layers + times.adapters + times.attention + times.elementwise + times.unpack) / job.shape.depth


def layer_launches(job: Job) -> float:
    """Kernels of all layers in one batch: forward passes, and the backward at twice a forward; MLPs in tiles launch
    theirs for each.
    """
    whole = sum(_launches(job, layer) for layer in job.shape.layers) * (job.passes + 2)
    return whole + _mlp_launches(job) * job.tiling.extra(2)


def _mlp_launches(job: Job) -> float:
    """Those of an average layer's MLP: its matrices and adapters, the activation (two, or one where fused), and a
    tile's copy.
    """
    depth = job.shape.depth
    matrices, adapters = len(mlp_matrices(job)) / depth, len(mlp_adapters(job)) / depth
    return matrices + _adapter_launches(job) * adapters + (2 if job.fused else 3)


def _adapter_launches(job: Job) -> int:
    own = job.compute == "float32" or not job.half_adapters
    return 2 if job.fused else 5 if own and job.compute != "float32" else 3


def _launches(job: Job, layer: Layer) -> float:
    """Kernels of one layer, a third of those of a forward and a backward: seven a norm (PyTorch's one kernel and the
    product with its weight, both ways: four thirds), ten for rotary positions, seven
    for attention, activation and residuals, one a matrix, three an adapter (peft's own scales, adds and under autocast
    casts besides); routing and grouped products some thirty, a loop ten an expert. Counted in ``tests/cost``.
    """
    shape = job.shape
    matrices, adapters = len(layer.matrices), len(job.adapted) / shape.depth
    experts = (30 if job.experts == "grouped" else 10 * layer.experts.count) if layer.experts else 0
    if job.fused:
        return matrices + _adapter_launches(job) * adapters + 7 + experts / 2
    norms = (4 / 3 if job.one_kernel_norms else 7) * (shape.norms + (2 if shape.head_norms else 0))
    return norms + 10 + matrices + _adapter_launches(job) * adapters + 7 + experts


def _queries(job: Job) -> int:
    """Waits of a step: none, but for a loop over experts."""
    experts = [layer.experts.count for layer in job.shape.layers if layer.experts]
    if not experts or job.experts == "grouped":
        return 0
    return dynamic_queries(max(experts), len(experts), round(job.passes), sorted_once=False)


def boundary_seconds(job: Job, rates: Ceilings) -> float:
    """What building boundaries in every layer would add to a step: (L − 1)·s, and L·s more with recompute."""
    each = build_seconds(job.tokens, job.attention, rates.copy)
    builds = job.passes * job.shape.depth - 1  # a layer that is recomputed builds twice
    return job.accumulate * builds * each
