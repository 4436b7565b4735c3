"""The ``bench`` commands: words become the options of ``bench/<name>_command.py``, which measures what they ask for."""

import json
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.bench import known_shapes
from slipstream.cli_output import JsonOption, console, importing, output

CsvOption = Annotated[Path | None, typer.Option("--csv", help="Append the result's rows to this CSV file.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Write the result document (JSON) to this file.")]

bench_app = typer.Typer(
    help="Measure an optimisation, on against off in one process.",
    no_args_is_help=True,
)


def _asked(flag: str, about: str, default: object, **more: Any) -> Any:
    """An option whose default depends on the device: told by ``--help``, and put in by the benchmark."""
    return typer.Option(flag, help=about, show_default=str(default), **more)


def _shapes(default: known_shapes.Default[tuple[str, ...]], known: Iterable[str] = known_shapes.ALL) -> Any:
    return _asked("--shape", f"Shapes of models, separated by commas: {', '.join(known)}.", default)


PACKING_ROWS = "on a card 2048 and the longest whose dense masks fit, else 256"
OFFLOAD_ROWS = "by shape 49152 or 24576 on a card, else 256"
OFFLOAD_LAYERS = "8 on a card, all for --part longest and document"
OFFLOAD_MODE = "eager; on a card compiled for --part longest and document"
EXPERTS_ROUNDS = f"{known_shapes.EXPERTS_ROUNDS}; of steps {known_shapes.EXPERTS_STEP_ROUNDS}"


@bench_app.command("packing")
def bench_packing(
    as_json: JsonOption = False,
    csv: CsvOption = None,
    out: OutOption = None,
    shape: Annotated[str | None, _shapes(known_shapes.PACKING_SHAPES)] = None,
    tokens: Annotated[str | None, _asked("--tokens", "Tokens of the rows, separated by commas.", PACKING_ROWS)] = None,
    attention: Annotated[
        str | None, _asked("--attention", "varlen, flex, xformers, sdpa; separated by commas.", "all")
    ] = None,
    activations: Annotated[str, typer.Option("--activations", help="keep, recompute, or both by a comma.")] = (
        "keep,recompute"
    ),
    rounds: Annotated[
        int | None, _asked("--rounds", "Timed rounds of all arms.", known_shapes.PACKING_ROUNDS, min=2)
    ] = None,
    layers: Annotated[int | None, _asked("--layers", "Fewer layers than the shapes have.", "all")] = None,
    part: Annotated[str, typer.Option("--part", help="layer (builds and one layer) or all (and steps).")] = "all",
    nf4: Annotated[bool, typer.Option("--nf4", help="Base weights in four bits (bitsandbytes).")] = False,
) -> None:
    """Boundaries built once a batch against once a layer: the published measurement, on this device."""
    words = {"shape": shape, "tokens": tokens, "attention": attention, "activations": activations}
    _bench("packing", as_json, out, csv, **words, rounds=rounds, layers=layers, part=part, nf4=nf4)


@bench_app.command("offload")
def bench_offload(
    as_json: JsonOption = False,
    csv: CsvOption = None,
    out: OutOption = None,
    shape: Annotated[str | None, _shapes(known_shapes.OFFLOAD_SHAPES)] = None,
    tokens: Annotated[str | None, _asked("--tokens", "Tokens of the rows, separated by commas.", OFFLOAD_ROWS)] = None,
    rounds: Annotated[
        int | None, _asked("--rounds", "Timed rounds of all arms.", known_shapes.OFFLOAD_ROUNDS, min=2)
    ] = None,
    layers: Annotated[
        int | None,
        _asked("--layers", "Fewer layers than the shapes have.", OFFLOAD_LAYERS),
    ] = None,
    part: Annotated[str, typer.Option("--part", help="reload, longest (rows that fit), document or all.")] = "reload",
    host_limit: Annotated[
        float | None, typer.Option("--host-limit", help="GiB of host memory.", show_default="80% of what is free")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option("--mode", help="eager or compiled layers.", show_default=OFFLOAD_MODE),
    ] = None,
    cap: Annotated[float, typer.Option("--cap", help="GB of device memory for --part longest.")] = 80.0,
    arms: Annotated[
        str | None,
        typer.Option(
            "--arms",
            help="For --part longest and document: offload-2, recompute; separated by a comma.",
            show_default="both",
        ),
    ] = None,
) -> None:
    """Layer inputs offloaded and reloaded ahead: the published measurement, on this device."""
    words = {"shape": shape, "tokens": tokens, "rounds": rounds, "layers": layers, "part": part}
    _bench("offload", as_json, out, csv, **words, host_limit=host_limit, mode=mode, cap=cap, arms=arms)


@bench_app.command("step")
def bench_step(
    as_json: JsonOption = False,
    csv: CsvOption = None,
    out: OutOption = None,
    shape: Annotated[str | None, _shapes(known_shapes.STEP_SHAPES)] = None,
    tokens: Annotated[int | None, _asked("--tokens", "Tokens of the row.", known_shapes.STEP_TOKENS)] = None,
    activations: Annotated[str, typer.Option("--activations", help="keep, recompute, offload or auto.")] = "keep",
    mode: Annotated[str | None, _asked("--mode", "eager, compiled, captured; separated by commas.", "all")] = None,
    rounds: Annotated[
        int | None, _asked("--rounds", "Timed rounds of all modes.", known_shapes.STEP_ROUNDS, min=2)
    ] = None,
    layers: Annotated[int | None, _asked("--layers", "Fewer layers than the shapes have.", "all")] = None,
) -> None:
    """Whole steps, eager, compiled and captured, beside the time that their matrix products take at best."""
    words = {"shape": shape, "tokens": tokens, "rounds": rounds, "layers": layers}
    _bench("step", as_json, out, csv, **words, activations=activations, mode=mode)


@bench_app.command("experts")
def bench_experts(
    as_json: JsonOption = False,
    csv: CsvOption = None,
    out: OutOption = None,
    shape: Annotated[str | None, _shapes(known_shapes.EXPERTS_SHAPES, known_shapes.MIXTURES)] = None,
    tokens: Annotated[int | None, _asked("--tokens", "Tokens of the row.", known_shapes.EXPERTS_TOKENS)] = None,
    adapters: Annotated[str | None, _asked("--adapters", "attention, experts; separated by a comma.", "both")] = None,
    rounds: Annotated[int | None, _asked("--rounds", "Timed rounds.", EXPERTS_ROUNDS, min=2)] = None,
    layers: Annotated[
        int | None, _asked("--layers", "Decoder layers of the steps.", known_shapes.EXPERTS_LAYERS)
    ] = None,
    part: Annotated[str, typer.Option("--part", help="layer, scaling, step or all.")] = "all",
) -> None:
    """Routing by one sort against a look-up for each expert, and whole steps beside transformers'."""
    words = {"shape": shape, "tokens": tokens, "rounds": rounds, "layers": layers}
    _bench("experts", as_json, out, csv, **words, adapters=adapters, part=part)


@bench_app.command("all")
def bench_all(
    as_json: JsonOption = False,
    csv: CsvOption = None,
    out: OutOption = None,
    shape: Annotated[str | None, _shapes(known_shapes.TOGETHER_SHAPES)] = None,
    tokens: Annotated[int | None, _asked("--tokens", "Tokens of the row.", known_shapes.TOGETHER_TOKENS)] = None,
    layers: Annotated[int | None, _asked("--layers", "Decoder layers.", "8 on a card, else all")] = None,
    rounds: Annotated[
        int | None, _asked("--rounds", "Timed rounds of all arms.", known_shapes.TOGETHER_ROUNDS, min=2)
    ] = None,
    attention: Annotated[str, typer.Option("--attention", help="auto, varlen, flex, xformers or sdpa.")] = "auto",
) -> None:
    """Every optimisation off, each alone, the published ones together, everything on."""
    words = {"shape": shape, "tokens": tokens, "rounds": rounds, "layers": layers}
    _bench("together", as_json, out, csv, **words, attention=attention)


def _bench(name: str, as_json: bool, out: Path | None, csv: Path | None, **words: Any) -> None:
    """Run a benchmark: ``bench/<name>_command.py`` makes options of the words and measures what they ask for."""
    with output(as_json) as emit:
        with importing():
            from slipstream.prepare import quiet_libraries

            command = import_module(f"slipstream.bench.{name}_command")
        quiet_libraries()
        result, last_line = command.run(command.options(**words), console(stderr=as_json), out=out, csv=csv)
        emit(result)
    if not as_json:
        print(json.dumps(last_line))
