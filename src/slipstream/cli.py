"""Commands and flags become a recipe and a call; nothing is decided here.

Everything heavy is imported inside the command that needs it, so that ``--help`` and a misspelt flag answer at once;
the price is imports that are not at the top of the file. With ``--json`` standard output carries one JSON document
and nothing else: what libraries print, down to the file descriptor, is sent to standard error meanwhile.
"""

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from slipstream.bench import known_shapes
from slipstream.errors import InputError, ToldElsewhereError
from slipstream.versions import SLIPSTREAM

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.recipe import Recipe

EXIT_READER_GONE = 141
"""Whoever read standard output has closed it (``slipstream data ... | head -1``): 128 + SIGPIPE, what a shell shows for
``cat``, ``grep`` and ``git``, which that signal ends without a word. 0 would tell a script that all was written, and 1
that there was a fault. The signal itself stays ignored, as Python has it: it would end a training run whose connection
to a tracker breaks."""
EXIT_INPUT = 2
EXIT_DOES_NOT_FIT = 3
EXIT_INTERRUPTED = 130
LET_SPEAK_SECONDS = 2.0
"""A launcher ends all processes as soon as one ends: the one that tells what is wrong needs a moment."""

app = typer.Typer(
    help="Fine-tune Hugging Face causal language models faster, without changing what is learned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

bench_app = typer.Typer(
    help="Measure an optimisation, on against off in one process.",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file (YAML).")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=V", help="Override one value of the recipe, e.g. train.steps=20; repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, the rest on stderr.")]


def main() -> None:
    """Run the command line: 0 done, 2 wrong input, 3 the plan does not fit, 130 interrupted, 141 the reader of standard
    output has gone, 1 anything else.
    """
    try:
        try:
            app(prog_name="slipstream")
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is told apart from a fault
    except ToldElsewhereError:
        time.sleep(LET_SPEAK_SECONDS)
        sys.exit(EXIT_INPUT)
    except InputError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        sys.exit(EXIT_INPUT)
    except KeyboardInterrupt:
        print("slipstream: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        _leave_without_reader()
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # the command line's library would leave with 1
            _leave_without_reader()
        raise


def _leave_without_reader() -> NoReturn:
    """Exit without a word; else the interpreter's own flush at exit would complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(EXIT_READER_GONE)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"slipstream {SLIPSTREAM}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run folder's last checkpoint.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fine-tune as the recipe says."""
    with _output(as_json) as emit:
        checked = _recipe(recipe, overrides)
        with _importing():
            from slipstream import run

        summary = run.train(checked, resume=resume, console=_console(stderr=as_json))
        if _speaks():
            emit(summary.to_dict())
    if summary.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def plan(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Plan for this device, e.g. h200, or for a file that doctor --json wrote there."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict memory and time without training; exit code 3 where it does not fit."""
    with _output(as_json) as emit:
        checked = _recipe(recipe, overrides)
        with _importing():
            from slipstream.plan import command

        document, fits = command.plan(checked, device=device, console=_console(stderr=as_json))
        emit(document)
    if not fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


@app.command()
def data(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Packed rows to show.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Show packed rows, and what of them is learned."""
    with _output(as_json) as emit:
        checked = _recipe(recipe, overrides)
        with _importing():
            from slipstream import run

        emit(run.show_data(checked, rows=rows, console=_console(stderr=as_json)))


@app.command()
def doctor(
    as_json: JsonOption = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure the device's ceilings again.")] = False,
) -> None:
    """Show what this machine offers, and why not."""
    with _output(as_json) as emit:
        with _importing():
            from slipstream import doctor as examination

        report = examination.report(fresh=fresh)
        examination.show(report, _console(stderr=as_json))
        emit(report)


@app.command()
def report(
    run_folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, as train wrote it.")],
    as_json: JsonOption = False,
) -> None:
    """Make a run's report.html again, from its records; also of a run that was cut short."""
    with _output(as_json) as emit:
        with _importing():
            from slipstream.report.html import write_report

        path = write_report(Path(run_folder))
        _console(stderr=as_json).print(f"report: {path}")
        emit({"report": str(path)})


@app.command()
def generate(
    run_folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, as train wrote it.")],
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask the tuned model.")],
    system: Annotated[str | None, typer.Option("--system", help="A system message before it.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The most tokens to answer with.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampling.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Try the tuned model on a prompt."""
    with _output(as_json) as emit:
        with _importing():
            from slipstream import results

        answer = results.generate(
            run_folder,
            prompt=prompt,
            system=system,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            console=_console(stderr=True),
        )
        emit({"prompt": prompt, "system": system, "answer": answer})
    if not as_json:
        print(answer)


@app.command()
def merge(
    run_folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, as train wrote it.")],
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="The folder to make; it must not exist, or be empty.")
    ],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option("--dtype", help="The merged weights' dtype; the base model's if not given."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the tuned model as one folder that transformers loads."""
    with _output(as_json) as emit:
        with _importing():
            from slipstream import results

        emit(results.merge(run_folder, out, dtype=dtype, console=_console(stderr=as_json)).to_dict())


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
    csv: Annotated[Path | None, typer.Option("--csv", help="Append the comparisons to this CSV file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the result document (JSON) to this file.")] = None,
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
    csv: Annotated[Path | None, typer.Option("--csv", help="Append the comparisons to this CSV file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the result document (JSON) to this file.")] = None,
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
    csv: Annotated[Path | None, typer.Option("--csv", help="Append the modes' times to this CSV file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the result document (JSON) to this file.")] = None,
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
    csv: Annotated[Path | None, typer.Option("--csv", help="Append the comparisons to this CSV file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the result document (JSON) to this file.")] = None,
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
    csv: Annotated[Path | None, typer.Option("--csv", help="Append the gains to this CSV file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the result document (JSON) to this file.")] = None,
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
    with _output(as_json) as emit:
        with _importing():
            from slipstream.prepare import quiet_libraries

            command = import_module(f"slipstream.bench.{name}_command")
        quiet_libraries()
        result, last_line = command.run(command.options(**words), _console(stderr=as_json), out=out, csv=csv)
        emit(result)
    if not as_json:
        print(json.dumps(last_line))


@contextmanager
def _importing() -> Iterator[None]:
    """A context for imports, without garbage collection: they make a million objects that stay, and looking through
    them again and again takes a fifth of the start. None of them is looked at later, either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _recipe(path: str, overrides: list[str] | None) -> "Recipe":
    """The checked recipe; read before ``run`` is imported, so that a mistake in it is told sooner."""
    with _importing():
        from slipstream.recipe import load_recipe

    return load_recipe(path, overrides or ())


def _console(*, stderr: bool) -> "Console":
    """A console that prints text as it is: brackets in a user's data are no markup, ``:id:`` is no emoji."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            _leave_without_reader()

    return Output(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _speaks() -> bool:
    """Whether this process is the one of several that prints, as the launcher numbers them."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _output(as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Give the command an ``emit`` for its result, which ends on standard output as JSON if that was asked for.

    A command that raises emits nothing.
    """
    results: list[dict[str, Any]] = []
    with _stdout_on_stderr() if as_json else nullcontext():
        yield results.append
    if as_json and _speaks():
        (result,) = results
        print(json.dumps(_finite(result), allow_nan=False, indent=2), flush=True)


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send what anyone prints to standard error: Python's prints, and those of libraries and worker processes."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as null, since JSON has no spelling for them (a loss can be one)."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
