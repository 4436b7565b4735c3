"""Fine-tune Hugging Face causal language models faster and with longer contexts, without changing what is learned.

The public names, loaded at first use, so that ``import slipstream`` and the command line answer at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.data.packing import pack, pack_dataset
    from slipstream.decision import Decision
    from slipstream.device.feed import PackedCollator
    from slipstream.device.segments import Segments
    from slipstream.errors import InputError
    from slipstream.train.train_step import TrainStep
    from slipstream.train.trainer import Trainer
    from slipstream.transform import Options, apply, decisions, restore

__all__ = [
    "Decision",
    "InputError",
    "Options",
    "PackedCollator",
    "Segments",
    "TrainStep",
    "Trainer",
    "apply",
    "decisions",
    "pack",
    "pack_dataset",
    "restore",
]

_HOMES = {
    "Decision": "slipstream.decision",
    "InputError": "slipstream.errors",
    "Options": "slipstream.transform",
    "PackedCollator": "slipstream.device.feed",
    "Segments": "slipstream.device.segments",
    "TrainStep": "slipstream.train.train_step",
    "Trainer": "slipstream.train.trainer",
    "apply": "slipstream.transform",
    "decisions": "slipstream.transform",
    "pack": "slipstream.data.packing",
    "pack_dataset": "slipstream.data.packing",
    "restore": "slipstream.transform",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
