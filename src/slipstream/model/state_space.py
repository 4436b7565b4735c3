"""State-space layers (Mamba and its kin), as adapters meet them.

Their mixers are written around fused kernels, which are handed the weights of ``x_proj``, ``dt_proj`` and ``out_proj``
instead of calling those layers: an adapter on one of them is passed by, gets no gradient and says nothing. Which of
them, depends on the family, on the kernels installed and on the mode. So ``all-linear`` leaves all three alone and
takes the input projection, through which every path goes. The alternative, to adapt what the path of this machine
calls, would train other adapters here than there.

A mixer is known by its parameters ``A_log`` and ``D``; a gated delta rule has no ``D``, and calls its layers.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

OWN_PARAMETERS = ("A_log", "D")
PASSED_BY = frozenset({"x_proj", "dt_proj", "out_proj"})
READ_ALWAYS = "dt_proj"
"""What every path reads the weight of."""
REFUSED_BY_PEFT = "out_proj"
PEFT_REFUSES_IN = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"})
"""Model types in which peft refuses an adapter on ``out_proj``, with a ``ValueError``."""


def passed_by(model: "nn.Module") -> set[str]:
    """Names of the layers in state-space mixers whose adapters a fused kernel passes by."""
    from torch import nn

    mixers = [
        (name, module)
        for name, module in model.named_modules()
        if all(own in dict(module.named_parameters(recurse=False)) for own in OWN_PARAMETERS)
    ]
    return {
        f"{name}.{leaf}"
        for name, mixer in mixers
        for leaf, child in mixer.named_children()
        if leaf in PASSED_BY and isinstance(child, nn.Linear)
    }


def untrainable(model: "nn.Module", targets: Iterable[str]) -> list[str]:
    """Those of ``targets`` that are never trained as adapters: no path calls them, or peft refuses them."""
    config = getattr(model, "config", None)
    leaves = {READ_ALWAYS, *([REFUSED_BY_PEFT] if getattr(config, "model_type", None) in PEFT_REFUSES_IN else [])}
    inside = passed_by(model)
    return [name for name in targets if name in inside and name.rpartition(".")[2] in leaves]
