"""An MLP over a long row, a tile of tokens at a time: what it computes with exists for one tile only.

A recomputed layer keeps nothing but its input; yet while it is at work all its activations live at once, and most of
them are the MLP's: three tensors of its inner width and the gradients of all three. An MLP treats each token by itself,
so a tile's forward and backward need no other tile. Here the MLP keeps what it reads, and its backward computes one
tile after the other again, each followed by its gradients.

    forward      for each tile: out = mlp(x)                             nothing kept but x
    recompute    ends where x is kept                                    nothing behind it is needed
    backward     for each tile: out = mlp(x); gradients of x and of what is trained

In a recomputed layer this costs no arithmetic: PyTorch stops a recompute at the last tensor that is needed, which is x,
so the MLP runs twice in all, as without tiles. (Behind the MLP of some families comes a norm, which needs its output
again; there it runs three times.) Weights' gradients are summed over tiles in float32 and rounded once. The price is a
few more launches, lost on rows this long. The alternative, PyTorch's checkpoint around each tile, computes all tiles
but the last twice over in the layer's recompute.

T: tokens; H: hidden width.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from slipstream.cost.settings import draws_by_itself
from slipstream.cost.tiles import TilesChoice, tile_tokens
from slipstream.decision import Decision
from slipstream.errors import InputError
from slipstream.model.experts_choice import find_experts
from slipstream.model.half_adapters import HALVES

TILED = "_slipstream_tiled"
"""What hangs on a tiled MLP: its ``TiledMLP``."""
TRIED, CLOSE = 6, 2e-2
"""Tokens on which an MLP is tried whole and in two parts, and the relative difference that is rounding."""


@dataclass(eq=False)
class TiledMLP:
    """One MLP in tiles; ``detach`` undoes it."""

    module: nn.Module
    tokens: int
    """Tokens of a tile."""
    compiled: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The module's forward as compiled layers run it, while they do."""

    def attach(self) -> None:
        """Override the module's forward on the instance, outside of compiled layers."""
        outside: Callable[..., Any] = torch.compiler.disable(self._forward)  # type: ignore[no-untyped-call]
        vars(self.module).update({TILED: self, "forward": outside})

    def detach(self) -> None:
        """Give the module its class's forward back."""
        for name in (TILED, "forward"):
            vars(self.module).pop(name, None)

    def compute(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """The MLP itself."""
        out: torch.Tensor = self.compiled(x_BTH) if self.compiled else type(self.module).forward(self.module, x_BTH)
        return out

    def _forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        if x_BTH.shape[:-1].numel() <= self.tokens or (self.module.training and _draws(self.module)):
            return self.compute(x_BTH)
        x_1TH = x_BTH.reshape(1, -1, x_BTH.shape[-1])
        trained = _Trained.of(self.module)
        if not (torch.is_grad_enabled() and (x_1TH.requires_grad or trained.tensors())):
            return self._each(x_1TH).view_as(x_BTH)
        keep: Callable[..., torch.Tensor] = _Keep.apply
        run: Callable[..., torch.Tensor] = _Run.apply
        if not x_1TH.requires_grad:  # autograd keeps nothing for a node without gradients
            x_1TH = x_1TH.detach().requires_grad_()
        kept = _Kept()
        return run(keep(kept, x_1TH), kept, self, trained, x_1TH, *trained.tensors()).view_as(x_BTH)

    def _each(self, x_1TH: torch.Tensor) -> torch.Tensor:
        """All tiles without gradients, written where they belong."""
        out_1TH: torch.Tensor | None = None
        for begin in range(0, x_1TH.shape[1], self.tokens):
            tile = slice(begin, begin + self.tokens)
            part = self.compute(x_1TH[:, tile])
            out_1TH = part.new_empty(1, x_1TH.shape[1], part.shape[-1]) if out_1TH is None else out_1TH
            out_1TH[:, tile] = part
        assert out_1TH is not None
        return out_1TH


class _Kept:
    """Where ``_Keep`` has put what the MLP reads."""

    node: Any = None


@dataclass(frozen=True)
class _Trained:
    """What has a gradient inside an MLP."""

    layers: tuple[Any, ...]
    """Adapter layers that compute from half-precision copies."""
    copies: tuple[torch.Tensor, ...]
    """Those copies, two a layer."""
    parameters: tuple[nn.Parameter, ...]
    """All other trained parameters."""

    @classmethod
    def of(cls, module: nn.Module) -> "_Trained":
        layers: tuple[Any, ...] = tuple(m for m in module.modules() if vars(m).get(HALVES) is not None)
        masters = {id(p) for layer in layers for p in layer.parameters() if p.requires_grad}
        masters -= {id(p) for layer in layers for p in layer.get_base_layer().parameters()}
        others = tuple(p for p in module.parameters() if p.requires_grad and id(p) not in masters)
        return cls(layers, tuple(half for layer in layers for half in vars(layer)[HALVES]), others)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self.copies, *self.parameters)

    @contextmanager
    def as_leaves(self) -> Iterator[list[torch.Tensor]]:
        """The same tensors as leaves of a graph of their own, in the layers' places inside the context."""
        before = [vars(layer)[HALVES] for layer in self.layers]
        halves = [half.detach().requires_grad_(half.requires_grad) for half in self.copies]
        for layer, pair in zip(self.layers, zip(halves[::2], halves[1::2], strict=True), strict=True):
            vars(layer)[HALVES] = pair
        try:
            yield [*halves, *self.parameters]
        finally:
            for layer, pair in zip(self.layers, before, strict=True):
                vars(layer)[HALVES] = pair


class _Keep(torch.autograd.Function):
    """Keeps a tensor before the MLP runs. Kept by the MLP's own node it would come too late: a node's tensors are kept
    when its forward is over, and a recompute would have to run the MLP to get there.
    """

    @staticmethod
    def forward(ctx: Any, kept: _Kept, x_1TH: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_1TH)
        kept.node = ctx
        return x_1TH.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        return None, None


class _Run(torch.autograd.Function):
    """All tiles; the backward computes each again."""

    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        kept: _Kept,
        tiled: TiledMLP,
        trained: _Trained,
        x_1TH: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        kind = x_1TH.device.type
        ctx.parts = kept, tiled, trained
        ctx.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return tiled._each(x_1TH)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, tiled, trained = ctx.parts
        (x_1TH,) = kept.node.saved_tensors
        kind = x_1TH.device.type
        again = nullcontext() if ctx.autocast is None else torch.autocast(kind, dtype=ctx.autocast)
        with torch.enable_grad(), again, trained.as_leaves() as leaves:
            grad_x_1TH, sums = _backward_by_tiles(tiled, x_1TH, leaves, grads[0], ctx.needs_input_grad[4])
        ends = [None if s is None else s.to(leaf.dtype) for s, leaf in zip(sums, leaves, strict=True)]
        return None, None, None, None, grad_x_1TH, *ends


def _backward_by_tiles(
    tiled: TiledMLP, x_1TH: torch.Tensor, leaves: Sequence[torch.Tensor], grad_1TH: torch.Tensor, wants_x: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Gradients of the MLP's input, and of each leaf summed over tiles in float32 (at least)."""
    grad_x_1TH = torch.empty_like(x_1TH) if wants_x else None
    sums: list[torch.Tensor | None] = [None] * len(leaves)
    wanted = [index for index, leaf in enumerate(leaves) if leaf.requires_grad]
    for begin in range(0, x_1TH.shape[1], tiled.tokens):
        tile = slice(begin, begin + tiled.tokens)
        part = x_1TH[:, tile].detach().requires_grad_()
        out = tiled.compute(part)
        asked = [part, *(leaves[index] for index in wanted)]
        found = torch.autograd.grad(out, asked, grad_1TH[:, tile], allow_unused=True)
        if grad_x_1TH is not None and found[0] is not None:
            grad_x_1TH[:, tile] = found[0]
        for index, grad in zip(wanted, found[1:], strict=True):
            sums[index] = _added(sums[index], grad)
    return grad_x_1TH, sums


def _added(total: torch.Tensor | None, grad: torch.Tensor | None) -> torch.Tensor | None:
    if grad is None:
        return total
    if total is None:
        return grad.to(torch.promote_types(grad.dtype, torch.float32))
    return total.add_(grad)


def tiled_mlps(module: nn.Module) -> list[TiledMLP]:
    """The tiled MLPs inside a module."""
    return [vars(m)[TILED] for m in module.modules() if TILED in vars(m)]


def tile_mlps(
    asked: TilesChoice, base: Any, recomputed: Sequence[nn.Module], layers: Sequence[nn.Module], tokens: int | None
) -> tuple[list[TiledMLP], Decision | None]:
    """The MLPs that are to run in tiles, not attached yet, and the decision; None where there was nothing to decide.

    ``recomputed``: decoder layers whose activations aren't kept; ``layers``: all of them, which a tile that is asked
    for goes to; ``tokens``: of a batch, where they are known. Raises ``InputError`` where tiles asked for can't be had.
    """
    if asked == "none":
        return [], Decision("tiled mlp", False, "asked for: tiles none")
    size = tile_tokens(asked, tokens, recomputed=bool(recomputed))
    if size is None:
        return [], None
    where = recomputed if asked == "auto" else layers
    obstacle = tile_obstacle(where) or _weights_obstacle(base, where)
    check_tiles(asked, obstacle)
    if obstacle is not None:
        return [], Decision("tiled mlp", False, obstacle)
    mlps: list[Any] = [layer.mlp for layer in where]
    return [TiledMLP(mlp, size) for mlp in mlps], tiled_decision(len(where), size)


def tiled_decision(layers: int, tile: int) -> Decision:
    """That the MLPs of so many layers run in tiles of so many tokens."""
    whose = "the MLP of 1 layer runs" if layers == 1 else f"the MLPs of {layers:,} layers run"
    reason = f"{whose} {tile:,} tokens at a time, so that only a tile's activations exist"
    return Decision("tiled mlp", True, reason)


def check_tiles(asked: TilesChoice, obstacle: str | None) -> None:
    """Raises ``InputError`` where a tile was asked for by its size and there is an ``obstacle``."""
    if obstacle is not None and asked not in ("auto", "none"):
        raise InputError(f"memory.tiles: {asked}: {obstacle}; set memory.tiles to auto or none")


def tile_obstacle(layers: Sequence[Any], drawing: Collection[nn.Module] = ()) -> str | None:
    """Why these layers' MLPs can't run in tiles, as far as it can be told without weights (they may be meta tensors).

    ``drawing``: modules that will get dropout in front of them, with an adapter.
    """
    if not layers:
        return "the model's layers can't be told apart"
    mlps: list[Any] = [getattr(layer, "mlp", None) for layer in layers]
    if not all(isinstance(mlp, nn.Module) for mlp in mlps):
        return f"{type(layers[0]).__name__} has no module called mlp"
    found = ((mlp, _mlp_obstacle(mlp, drawing)) for mlp in mlps)
    return next((f"{type(mlp).__name__} {why}" for mlp, why in found if why is not None), None)


def _mlp_obstacle(mlp: nn.Module, drawing: Collection[nn.Module]) -> str | None:
    if find_experts(mlp):
        return "sends tokens to experts, whose products are over all tokens at once"
    if "forward" in vars(mlp):
        return "has a forward of its own on the instance"
    if _draws(mlp) or any(module in drawing for module in mlp.modules()):
        return "has dropout, which another pass through a tile would draw anew"
    given = list(inspect.signature(type(mlp).forward).parameters.values())[1:]
    needed = [one.name for one in given if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return f"takes more than hidden states ({', '.join(needed)})" if len(needed) > 1 else None


def _weights_obstacle(base: Any, layers: Sequence[Any]) -> str | None:
    """What running one MLP of each class shows against tiles."""
    kinds = {type(layer.mlp): layer.mlp for layer in layers}
    return next((why for mlp in kinds.values() if (why := _differs(base, mlp)) is not None), None)


def _draws(module: nn.Module) -> bool:
    """Whether it draws random numbers in training: by a dropout module, or by a number of its own."""
    return any((isinstance(m, _DropoutNd) and m.p > 0) or draws_by_itself(m) for m in module.modules())


@torch.no_grad()
def _differs(base: Any, mlp: Any) -> str | None:
    """Why an MLP isn't one that treats each token by itself, tried on a few; None where it is."""
    weight = next(base.get_input_embeddings().parameters())
    device = next(mlp.parameters()).device
    if device.type == "meta":
        return "weights without values can't be tried"
    draw = torch.Generator(device).manual_seed(0)
    width = base.config.get_text_config().hidden_size
    x_1TH = torch.randn(1, TRIED, width, generator=draw, device=device, dtype=torch.float32).to(weight.dtype)
    whole = mlp(x_1TH)
    if not isinstance(whole, torch.Tensor):
        return f"{type(mlp).__name__} gives more than a tensor"
    parts = torch.cat([mlp(x_1TH[:, :2]), mlp(x_1TH[:, 2:])], dim=1)
    difference = float((whole - parts).float().norm() / whole.float().norm())
    return None if difference <= CLOSE else f"{type(mlp).__name__} does not treat each token by itself"
