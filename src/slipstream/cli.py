"""Commands and flags become a recipe and a call; nothing is decided here.

Everything heavy is imported inside the command that needs it, so that ``--help`` and a misspelt flag answer at once;
the price is imports that are not at the top of the file.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slipstream.cli_bench import bench_app
from slipstream.cli_output import JsonOption, console, importing, leave_without_reader, output, speaks
from slipstream.errors import InputError, ToldElsewhereError
from slipstream.versions import SLIPSTREAM

if TYPE_CHECKING:
    from slipstream.recipe import Recipe

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
app.add_typer(bench_app, name="bench")

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file (YAML).")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=V", help="Override one value of the recipe, e.g. train.steps=20; repeatable."),
]


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
        leave_without_reader()
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # the command line's library would leave with 1
            leave_without_reader()
        raise


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
    with output(as_json) as emit:
        with _first_speaks_first():
            checked = _recipe(recipe, overrides)
        with importing():
            from slipstream import run

        summary = run.train(checked, resume=resume, console=console(stderr=as_json))
        if speaks():
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
    with output(as_json) as emit:
        checked = _recipe(recipe, overrides)
        with importing():
            from slipstream.plan import command

        document, fits = command.plan(checked, device=device, console=console(stderr=as_json))
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
    with output(as_json) as emit:
        checked = _recipe(recipe, overrides)
        with importing():
            from slipstream import run

        emit(run.show_data(checked, rows=rows, console=console(stderr=as_json)))


@app.command()
def doctor(
    as_json: JsonOption = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure the device's ceilings again.")] = False,
) -> None:
    """Show what this machine offers, and why not."""
    with output(as_json) as emit:
        with importing():
            from slipstream import doctor as examination

        report = examination.report(fresh=fresh)
        examination.show(report, console(stderr=as_json))
        emit(report)


@app.command()
def report(
    run_folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, as train wrote it.")],
    as_json: JsonOption = False,
) -> None:
    """Make a run's report.html again, from its records; also of a run that was cut short."""
    with output(as_json) as emit:
        with importing():
            from slipstream.report.html import remake_report

        path, missing = remake_report(Path(run_folder))
        said = console(stderr=as_json)
        for problem in missing:
            said.print(f"incomplete: {problem}")
        said.print(f"report: {path}")
        emit({"report": str(path), "incomplete": missing})


@app.command()
def generate(
    run_folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or a merged model's.")],
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask the tuned model.")],
    system: Annotated[str | None, typer.Option("--system", help="A system message before it.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The most tokens to answer with.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Try the tuned model on a prompt."""
    with output(as_json) as emit:
        with importing():
            from slipstream import results

        answer = results.generate(
            run_folder,
            prompt=prompt,
            system=system,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            console=console(stderr=True),
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
    with output(as_json) as emit:
        with importing():
            from slipstream import results

        emit(results.merge(run_folder, out, dtype=dtype, console=console(stderr=as_json)).to_dict())


@contextmanager
def _first_speaks_first() -> Iterator[None]:
    """What every process of a run finds wrong before they are joined is told by the first of them: the launcher, which
    ends all once that one has ended, leaves the others no time to. What another one finds alone, it tells later.
    """
    try:
        yield
    except InputError:
        if not speaks():
            time.sleep(LET_SPEAK_SECONDS)
        raise


def _recipe(path: str, overrides: list[str] | None) -> "Recipe":
    """The checked recipe; read before ``run`` is imported, so that a mistake in it is told sooner."""
    with importing():
        from slipstream.recipe import load_recipe

    return load_recipe(path, overrides or ())
