"""What a plan can say of a model whose layers the cost model doesn't know: Mamba, RWKV and their kin.

Weights, what is trained, data and steps are counted as for any model; what layers keep for their backward and how long
they take is left out and said. So memory is a lower bound: a plan that it does not fit is certain, one that it fits is
not made. The alternative, formulas for each kind of recurrence, depends on which kernels are installed.
"""

from dataclasses import asdict
from typing import Any

from torch import nn

from slipstream.cost.hardware import compute_dtype
from slipstream.cost.job import Job
from slipstream.cost.memory import Part, held_parts, room
from slipstream.cost.shape import Layer, Matrix, ModelShape
from slipstream.data.account import counted
from slipstream.data.packing import PackingReport
from slipstream.data.tokens import TokenisedSet
from slipstream.decision import Decision
from slipstream.memory.checkpointing import check_recomputes, checkpoint_layers
from slipstream.memory.policy import Situation, choose_activations
from slipstream.model.load import check_context
from slipstream.plan.facts import Target, adapted_sizes, learned_rows, saved_whole
from slipstream.plan.prediction import weights_dtype
from slipstream.prepare import UNPACKED, planned_steps
from slipstream.recipe import Recipe
from slipstream.report.numbers import bytes_text
from slipstream.step.choice import Circumstances, choose_mode, trains_whole
from slipstream.train.options import check_schedule


def partial_plan(
    recipe: Recipe, model: Any, reason: str, aim: Target, train: TokenisedSet, tokens: list[int], told: list[Decision]
) -> tuple[dict[str, Any], list[str]]:
    """The plan for a machine and, in lines, for people. ``reason``: why the rest is not predicted; ``tokens``: those
    whose rows are learned; ``told``: decisions made before. Raises ``InputError`` for what training refuses.
    """
    report = PackingReport.unpacked(train.lengths, recipe.packing.rows, recipe.packing.tokens)
    steps, job = planned_steps(recipe, report.rows), _job(recipe, model, aim, train, tokens)
    check_schedule(recipe.train, steps)
    parts = [part for part in held_parts(job) if part.bytes]
    least, usable = sum(part.bytes for part in parts), room(aim.device, aim.free)
    decided = [*_decisions(recipe, model, reason, aim, job), *told]
    context = check_context(model.config, int(train.lengths.max()), "data.max_length")
    decided += [] if context is None else [context]
    document = {
        "fits": False if least > usable else None,
        "missing": reason,
        "model": recipe.model,
        "parameters": {"total": job.shape.parameters, "trained": job.trained},
        "device": asdict(aim.device),
        "data": train.account.as_json(),
        "packing": {**asdict(report), "padded_ratio": report.padded_ratio},
        "memory": {"device": [{**asdict(part), "bytes": round(part.bytes)} for part in parts], "host": []},
        "least_bytes": round(least),
        "room_bytes": round(usable),
        "steps": steps,
        "decisions": [asdict(decision) for decision in decided],
    }
    return document, [*_lines(reason, parts, report, steps, usable, aim), *(f"  {decision}" for decision in decided)]


def _lines(reason: str, parts: list[Part], report: PackingReport, steps: int, usable: float, aim: Target) -> list[str]:
    least = sum(part.bytes for part in parts)
    verdict = "does not fit" if least > usable else "may fit"
    return [
        f"{verdict}: {bytes_text(least)} are held whatever the layers compute, of {bytes_text(usable)} usable on "
        f"{aim.device.name}",
        *(f"  {part.name}: {bytes_text(part.bytes)} ({part.what})" for part in parts),
        f"  not packed: {1 - report.fill:.1%} of the tokens computed are padding; {counted(steps, 'step')}",
        f"  not predicted: activations, and the time of a step: {reason}; train runs all the same",
    ]


def _job(recipe: Recipe, model: Any, aim: Target, train: TokenisedSet, tokens: list[int]) -> Job:
    full = recipe.adapter.kind == "none"
    return Job(
        shape=_bare_shape(model),
        tokens=int(train.lengths.max()) * recipe.packing.rows,
        lengths=train.lengths,
        full=full,
        rank=0 if full else recipe.adapter.rank,
        adapted=() if full else adapted_sizes(recipe.adapter, model),
        saved=0 if full else saved_whole(recipe.adapter, model) + learned_rows(recipe.adapter, model, tokens),
        weights=weights_dtype(recipe, aim.device),
        nf4=str(recipe.load.quantize) == "nf4",
        compute=compute_dtype(aim.device),
        optimizer=recipe.train.optimizer,
    )


def _bare_shape(model: Any) -> ModelShape:
    """The sizes that weights, gradients and optimizer are counted by; all linear layers as one layer's."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    linear = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    matrices = tuple(Matrix(name, module.in_features, module.out_features) for name, module in linear)
    vocabulary, hidden = embedding.weight.shape
    return ModelShape(
        kind=str(model.config.model_type),
        hidden=hidden,
        query=0,
        key=0,
        value=0,
        out=0,
        heads=0,
        vocabulary=vocabulary,
        tied=head is None or head.weight is embedding.weight,
        norms=0,
        head_norms=False,
        inner=0,
        layers=(Layer(matrices, None, None),),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _decisions(recipe: Recipe, model: Any, reason: str, aim: Target, job: Job) -> list[Decision]:
    """What training will decide, by the same functions."""
    layers, memory = len(checkpoint_layers(model)), recipe.memory
    now = Situation(device=aim.device, layers=layers, job=None, unknown=f"model: {reason}", buffers=memory.buffers)
    chosen = choose_activations(memory.activations, now)
    if chosen.split is not None and chosen.split.kept < chosen.split.layers:
        check_recomputes(model)
    about = Circumstances(
        device=aim.device,
        packed=False,
        attention=None,
        host_positions=False,
        host_experts=False,
        whole=trains_whole(job.trained, job.shape.parameters + (0 if job.full else job.trained)),
        compiler=None,
    )
    _, stepping = choose_mode(recipe.train.mode, about)
    return [*UNPACKED.values(), *chosen.decisions, stepping]
