"""Plans and the host's memory: what training would refuse does not fit, and what to change is said."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cost.configs import QWEN3_06B
from planning import GIB, decisions, plan, recipe_of
from slipstream.memory import host_budget
from slipstream.plan import command, facts


def host_of(gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the known devices' machines have so much host memory free."""
    known = command.target
    monkeypatch.setattr(command, "target", lambda name: replace(known(name), host=gib * GIB))


LONG = ("packing.tokens=65536", "memory.activations=offload")


@pytest.mark.parametrize(("host", "fits"), [(8.0, True), (2.0, False)])
def test_a_verdict_is_about_the_host_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: float, fits: bool
) -> None:
    """3.4 GiB of layer inputs are well on the device and, with 30 GiB allowed, not on a host with 2 GiB free."""
    host_of(host, monkeypatch)
    document, found, said = plan(recipe_of(tmp_path, QWEN3_06B, *LONG, "memory.host_limit=30"))
    assert document["host_bytes"] == 27 * 65_536 * 1024 * 2
    assert document["device_bytes"] < document["room_bytes"]
    assert document["fits"] is found is fits
    (verdict,) = re.findall(r"^(fits|does not fit): .* and 3.4 GiB of the (\S+) GiB of host memory", said, re.MULTILINE)
    assert verdict == ("fits" if fits else "does not fit", str(host))
    told = decisions(document)
    assert f"memory.host_limit is 30.0 GiB, but only {host} GiB of host memory is free" in told["offload"][1]
    assert ("host memory" in told) is not fits
    if not fits:
        assert "needs 3.4 GiB of host memory (27 layer inputs of 128.0 MiB)" in told["host memory"][1]


@pytest.mark.usefixtures("cpu_machine")
@pytest.mark.parametrize("limit", [None, 3.0, 30.0])
def test_a_plan_counts_on_what_training_counts_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float | None
) -> None:
    for module in (facts, host_budget):
        monkeypatch.setattr(module, "free_host_memory", lambda: 10 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    asked = () if limit is None else (f"memory.host_limit={limit}",)
    document, _, _ = plan(recipe_of(tmp_path, QWEN3_06B, *asked), None)
    assert document["host_room_bytes"] == host_budget.host_budget(limit).nbytes
    assert document["host_room_bytes"] == {None: 4 * GIB, 3.0: 1.5 * GIB, 30.0: 5 * GIB}[limit]


def test_what_is_too_much_for_the_host_can_be_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the options that have no effect then: the schema refuses them."""
    host_of(2.0, monkeypatch)
    given = ("memory.host_limit=30", "memory.buffers=3")
    document, _, said = plan(recipe_of(tmp_path, QWEN3_06B, *LONG, *given))
    changes = {"memory.activations": "recompute", "memory.buffers": "auto", "memory.host_limit": None}
    assert changes in [remedy["changes"] for remedy in document["remedies"]]
    flags = "--set memory.activations=recompute --set memory.buffers=auto --set memory.host_limit=null"
    assert flags in said
    followed = [flag for flag in flags.split() if flag != "--set"]
    assert plan(recipe_of(tmp_path, tmp_path / "model", *LONG, *given, *followed))[1]
