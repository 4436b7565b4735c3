"""A training step whose tensors have no storage, and the peak of what it would have held.

Real module code, autograd, checkpointing, loss and optimizer run on fake tensors, and every storage is counted while it
lives: what a step holds at its peak is known for any size, without a card and in seconds. Attention is the CPU's, which
repeats grouped heads and saves a dense mask a layer.
"""

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.cost.offload import Split
from slipstream.memory.checkpointing import set_checkpointing
from slipstream.model.half_adapters import HalfAdapters
from slipstream.model.head import Head
from slipstream.model.lora import AdapterOptions, add_adapter
from slipstream.model.tiled_mlp import TiledMLP
from slipstream.train.loss import summed_cross_entropy

ROUNDING = 512
"""The allocator's smallest block."""


class Peak(TorchDispatchMode):
    """Bytes of all storages alive, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        return out

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, -(-storage.nbytes() // ROUNDING) * ROUNDING
        if key not in self._alive:
            self._alive.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


def simulated_peak(
    config: dict[str, Any],
    tokens: int,
    *,
    recompute: bool,
    full: bool,
    dtype: torch.dtype,
    autocast: bool,
    tiles: int | None = None,
) -> int:
    """Bytes at the peak of the second step (with optimizer state) of a model of this configuration.

    ``tiles``: tokens of an MLP's tile.
    """
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype, attn_implementation="sdpa")
    model = made if full else add_adapter(made, AdapterOptions(), seed=0)
    model.train()
    layers = made.config.num_hidden_layers
    set_checkpointing(made, Split(0, layers, 0) if recompute else Split(layers, 0, 0), decide=print)
    for layer in made.get_decoder().layers if tiles else ():
        TiledMLP(layer.mlp, tiles).attach()
    with FakeTensorMode(), Peak() as counted:
        _fill(model)
        HalfAdapters.attach(made, torch.bfloat16 if autocast else dtype)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True)
        for _ in range(2):
            counted.peak = counted.now
            ids = torch.zeros(1, tokens, dtype=torch.int64)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                hidden = made.get_decoder()(input_ids=ids, use_cache=False)[0]
                loss = summed_cross_entropy(hidden, ids, Head(made.get_output_embeddings()))
            del hidden
            loss.backward()
            peak = counted.peak
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return peak


def loss_peak(
    config: dict[str, Any], tokens: int, *, dtype: torch.dtype, trained: bool, softcap: float | None = None
) -> int:
    """Bytes that the eager loss of one row and its backward hold at their peak, beside hidden states and head."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    with FakeTensorMode(), Peak() as counted:
        project = torch.nn.Linear(hidden, vocabulary, bias=False, dtype=dtype).requires_grad_(trained)
        features = torch.empty(1, tokens, hidden, dtype=dtype, requires_grad=True)
        for tensor in (project.weight, features):
            counted.count(tensor)
        counted.peak = before = counted.now
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        summed_cross_entropy(features, ids, Head(project, softcap=softcap)).backward()
        return counted.peak - before


def _fill(model: Any) -> None:
    """Fake tensors in place of the model's meta tensors; what is shared stays shared."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is None:
                continue
            if id(value) not in made:
                empty = torch.empty(value.shape, dtype=value.dtype)
                parameter = isinstance(value, torch.nn.Parameter)
                made[id(value)] = torch.nn.Parameter(empty, value.requires_grad) if parameter else empty
            (module._parameters if name in module._parameters else module._buffers)[name] = made[id(value)]
