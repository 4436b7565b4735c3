"""The repository's own promises: pinned installs, documented dependencies, a small sorted surface, quick start-up."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import slipstream

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines if line and not line.startswith("#"))
    }


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_every_dependency_is_pinned_within_its_bounds(requirement: Requirement) -> None:
    pinned = pins().get(canonicalize_name(requirement.name))
    assert pinned, f"{requirement.name} is missing in constraints.txt"
    assert requirement.specifier.contains(pinned)


def test_pins_are_exact_and_sorted() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > len(requirements())  # the indirect ones too
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line) for line in lines)
    assert lines == sorted(lines, key=str.lower)


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_every_dependency_has_its_reason_written_down(requirement: Requirement) -> None:
    rows = [line for line in (ROOT / "docs/dependencies.md").read_text().splitlines() if line.startswith("| ")]
    assert any(row.startswith(f"| {requirement.name} |") for row in rows)


def test_what_is_imported_is_declared() -> None:
    declared = {canonicalize_name(requirement.name) for requirement in requirements()}
    imported = {name.partition(".")[0] for path in SOURCES for name in imports(path)}
    imported -= {*sys.stdlib_module_names, "slipstream", "triton"}  # which CUDA builds of torch bring along
    assert {"torch", "yaml"} <= imported
    offered = packages_distributions()
    undeclared = {name for name in imported if declared.isdisjoint(map(canonicalize_name, offered.get(name, [name])))}
    assert undeclared == set()


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_the_public_surface_is_sorted_and_there() -> None:
    assert slipstream.__all__
    assert list(slipstream.__all__) == sorted(slipstream.__all__)
    assert [name for name in slipstream.__all__ if not hasattr(slipstream, name)] == []


def test_continuous_integration_runs_the_tests_as_documented() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "make test"


def test_no_file_is_a_drawer_for_odds_and_ends() -> None:
    assert SOURCES
    assert [path for path in SOURCES if path.stem in {"utils", "common", "helpers"}] == []


def test_no_exception_is_caught_broadly() -> None:
    handlers = [
        (path.name, node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
    ]
    assert handlers
    broad = {"Exception", "BaseException", None}
    caught = [(name, node.lineno) for name, node in handlers if (node.type and ast.unparse(node.type)) in broad]
    assert caught == []


def test_the_command_line_starts_without_the_heavy_libraries() -> None:
    program = (
        "import sys, slipstream.cli; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
