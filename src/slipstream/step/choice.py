"""Which way a step runs: captured before compiled before eager, where model, options and device can take it.

Nothing is tried here; what stands against a mode is asked beforehand, so that a choice never ends in a crash. A capture
that fails nevertheless is told by ``captured.CaptureError``, and the step goes on in the next mode.
"""

from dataclasses import dataclass
from typing import Literal

from slipstream.cost.hardware import Device
from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.values import checked

ModeChoice = Literal["auto", "eager", "compiled", "captured"]
Mode = Literal["eager", "compiled", "captured"]


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What a mode depends on."""

    device: Device
    packed: bool
    """Whether batches are packed rows of one length."""
    attention: str | None
    """The attention choice in place; None for the model's own."""
    host_positions: bool = False
    """Whether positions are scaled by each document's length, which only the host knows."""
    host_experts: bool = False
    """Whether experts are called one by one, as the host finds them."""
    processes: int = 1
    devices: int = 1
    """Devices that the model is split over."""
    whole: bool = False
    """Whether all weights are trained, or most of them (``trains_whole``)."""
    scaled_gradients: bool = False
    """Whether a gradient scaler looks at gradients (float16)."""
    compiler: str | None = None
    """Why compiling can't work here, or None."""


def choose_mode(asked: ModeChoice, about: Circumstances) -> tuple[Mode, Decision]:
    """The mode, and the decision. Raises ``InputError`` where a named mode can't be had, or is none."""
    if problems := checked("train.mode", asked, ModeChoice)[1]:
        raise InputError("; ".join(problems))
    captured, compiled = capture_obstacle(about), compile_obstacle(about)
    if asked == "captured" and captured:
        raise InputError(
            f"train.mode captured: {captured}; set train.mode to auto or {'eager' if compiled else 'compiled'}"
        )
    if asked == "compiled" and compiled:
        raise InputError(f"train.mode compiled: {compiled}; set train.mode to auto or eager")
    if asked != "auto":
        return asked, Decision("step", asked != "eager", f"{asked}, as asked for")
    if captured is None:
        return "captured", Decision("step", True, "captured: one launch replays forward, loss and backward")
    if about.device.kind == "cuda" and compiled is None:
        return "compiled", Decision("step", True, f"compiled, not captured: {captured}")
    reason = captured if compiled is None else f"{captured}; not compiled: {compiled}"
    return "eager", Decision("step", False, f"eager: {reason}")


def check_mode(asked: ModeChoice, device: Device, *, packed: bool) -> None:
    """Raises ``InputError`` for a named mode that no model could have on this device: told before one is loaded."""
    known = Circumstances(device=device, packed=packed, attention="varlen", compiler=compiler_obstacle(device))
    choose_mode(asked, known)


def capture_obstacle(about: Circumstances) -> str | None:
    """What stands against recording the step, or None."""
    if about.device.kind != "cuda":
        return f"CUDA graphs need a CUDA device, and this is {about.device.in_words}"
    if about.compiler:
        return about.compiler
    if not about.packed:
        return "batches are padded, so their shapes change"
    if about.attention in ("flex", "xformers", None):
        return f"attention {about.attention or 'of the model itself'} builds its structure on the host for each batch"
    if about.host_positions:
        return "rotary positions are scaled by each document's length, on the host"
    if about.host_experts:
        return "experts are called one by one, as the host finds their tokens (experts: loop)"
    if about.processes > 1:
        return f"{about.processes} processes exchange gradients outside the graph"
    if about.devices > 1:
        return f"the model is split over {about.devices} devices"
    if about.whole:
        return "all weights are trained, and a recorded step would hold their gradients twice"
    if about.scaled_gradients:
        return "float16 gradients are scaled, which is decided on the host"
    return None


def trains_whole(trained: int, total: int) -> bool:
    """Whether ``trained`` of ``total`` parameters count as all: their gradients are then most of a step's memory."""
    return 2 * trained > total


def compile_obstacle(about: Circumstances) -> str | None:
    """What stands against compiling the layers, or None."""
    if about.compiler:
        return about.compiler
    if not about.packed:
        return "batches are padded, so their shapes change"
    return None


def compiler_obstacle(device: Device) -> str | None:
    """Why torch.compile can't make code for this device, or None."""
    import shutil
    from importlib.util import find_spec

    if device.kind == "cuda":
        if device.compute_capability is not None and device.compute_capability < (7, 0):
            return f"Triton needs compute capability 7.0 or newer, {device.name} has {device.capability}"
        return None if find_spec("triton") else "Triton is not installed"
    return None if any(map(shutil.which, ("g++", "clang++", "c++"))) else "no C++ compiler was found"
