"""Whether the script that compares what is learned can tell: same arms are equal, other seeds are not, faults fail."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.bench.learning import ADAPTERS, MODES, distance
from slipstream.bench.learning_arms import document_mask
from slipstream.bench.learning_verdicts import compared, merged, verdicts
from slipstream.device.segments import Segments
from slipstream.errors import InputError

SCRIPT = Path(__file__).parents[2] / "benchmarks/bench_learning.py"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("bench_learning", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)  # as Python does for a script
        yield module


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"prompt": f"What is {n} times {n}? ", "completion": f"It is {n * n}." * (1 + n % 3)} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measured(script: Any, data: Path, out: Path, *words: str) -> dict[str, Any]:
    common = ["--data", str(data), "--tokens", "128", "--steps", "3", "--every", "2", "--out", str(out)]
    assert script.main([*common, *words]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_modes_are_compared_with_eager(script: Any, data: Path, tmp_path: Path) -> None:
    arms = "eager-again,eager-recompute,eager-float32,captured"
    result = measured(script, data, tmp_path / "modes.json", "--part", "modes", "--arms", arms)
    (row,) = result["rows"]
    assert len(row["arms"]["eager"]["losses"]) == 3
    assert row["arms"]["eager-float32"]["refused"] == "every arm computes in float32"
    assert "CUDA" in row["arms"]["captured"]["refused"] or torch.cuda.is_available()
    again = next(one for one in row["comparisons"] if one["arm"] == "eager-again")
    assert again["bitwise"] or torch.cuda.is_available()
    assert str(tmp_path) not in json.dumps(result)
    assert result["command"].startswith("python benchmarks/bench_learning.py --data rows.jsonl --tokens 128")


def test_half_precision_is_further_from_float32_than_from_itself(script: Any, data: Path, tmp_path: Path) -> None:
    words = ["--part", "modes", "--dtype", "bfloat16", "--arms", "eager-float32,eager-peft"]
    (row,) = measured(script, data, tmp_path / "modes.json", *words)["rows"]
    exact, peft = row["comparisons"]
    assert [exact["arm"], peft["arm"]] == ["eager-float32", "eager-peft"]
    assert 1e-5 < exact["gradient"] < 0.1
    assert 0 < exact["largest"] < 0.01
    assert peft["largest"] > 0  # peft rounds the adapter's product once more
    assert exact["from_float32"] == 0.0
    decisions = {name: [one for one in arm["decisions"] if "half adapters" in one] for name, arm in row["arms"].items()}
    assert "cast together" in decisions["eager"][0]
    assert "no plain float32 LoRA layers" in decisions["eager-peft"][0]


def test_arms_of_several_processes_are_merged(
    script: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for arm in ADAPTERS:
        files.append(tmp_path / f"{arm}.json")
        (row,) = measured(script, data, files[-1], "--part", "adapters", "--arms", arm)["rows"]
        assert list(row["arms"][arm]["held_out"]) == ["0", "2", "3"]
        assert row["arms"][arm]["held_out"]["3"] < row["arms"][arm]["held_out"]["0"]
        assert not row["comparisons"]
    out = tmp_path / "all.json"
    assert script.main(["--merge", *map(str, files), "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    peft, seeds, exact = row["comparisons"]
    assert peft["within"] and exact["within"]  # noqa: PT018
    assert abs(peft["relative"]) < 1e-6
    assert abs(seeds["relative"]) > 1e-5
    assert row["held_out_documents"] == 6
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"benchmark": "learning", "adapters": verdicts(row)}
    one, other = (row["arms"][name]["losses"] for name in ("slipstream", "peft"))
    assert one == pytest.approx(other, rel=1e-6)
    with pytest.raises(InputError, match="peft is in two results"):
        merged([json.loads(files[1].read_text())] * 2)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data", "nowhere.jsonl"], "--data nowhere.jsonl: no such file"),
        ([], "--data is missing"),
        (["--data", "DATA", "--arms", "eagr"], "--arms 'eagr': unknown for --part all"),
        (["--data", "DATA", "--part", "modes", "--arms", "peft"], "--arms 'peft': unknown for --part modes"),
        (["--data", "DATA", "--arms", ""], "--arms '': unknown"),
        (["--data", "DATA", "--model", "nothing"], "--model nothing: neither"),
        (["--data", "DATA", "--steps", "0"], "--steps 0 < 1"),
        (["--merge", "nowhere.json"], "--merge nowhere.json: no such file"),
    ],
)
def test_what_can_not_be_measured_is_told_once(
    script: Any, data: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([str(data) if word == "DATA" else word for word in words]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(told)
    assert err.count("\n") == 1
    assert not out


def test_documents_see_what_segments_let_them_see() -> None:
    lengths, total = (3, 1, 4), 10
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 0, 0]])
    mask = document_mask(positions, torch.float32)
    expected = Segments.from_lengths(lengths, total=total).mask(torch.float32)
    used = sum(lengths)
    assert torch.equal((mask == 0)[..., :used, :used], (expected == 0)[..., :used, :used])
    assert bool((mask == 0).diagonal(dim1=-2, dim2=-1).all())
    assert int((mask == 0).sum()) == 6 + 1 + 10 + 2


def test_distance_is_relative() -> None:
    reference = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    moved = {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([4.0])}
    assert distance(moved, reference) == pytest.approx(0.1)
    assert distance(reference, reference) == 0.0


def mode_row(dtype: str = "bfloat16", **arms: tuple[list[float], float]) -> dict[str, Any]:
    def arm(name: str, losses: list[float], gradient: float) -> dict[str, Any]:
        away = {"eager": gradient, "eager-float32": 0.01}
        return {"ran": name, "start": "s", "order": "o", "losses": losses, "gradient_distance": away}

    named = {name.replace("_", "-"): arm(name.replace("_", "-"), *told) for name, told in arms.items()}
    return compared({"part": "modes", "dtype": dtype, "arms": named})


def test_a_mode_may_deviate_as_eager_ways_do() -> None:
    same, near, far = ([2.0, 2.0], 0.0), ([2.0, 2.01], 0.02), ([2.0, 2.03], 0.02)
    row = mode_row(eager=same, eager_again=same, eager_masked=near, compiled=near, captured=far)
    assert verdicts(row) == {"compiled against eager": True, "captured against eager": False}
    assert not verdicts(mode_row(eager=same, eager_again=same, compiled=near))["compiled against eager"]
    assert not verdicts(mode_row(eager=same, eager_masked=near, compiled=([2.0, 2.0], 0.03)))["compiled against eager"]


def test_a_mode_may_deviate_by_twice_eagers_rounding() -> None:
    same = ([2.0, 2.0], 0.0)
    row = mode_row(eager=same, eager_float32=([2.0, 2.01], 0.01), compiled=([2.0, 1.981], 0.02))
    *_, mode = row["comparisons"]
    assert mode["within"]
    assert not mode["within_spread"]
    assert mode["from_float32"] == pytest.approx(0.0145)
    row = mode_row(eager=same, eager_float32=([2.0, 2.01], 0.01), compiled=([2.0, 1.97], 0.02))
    assert not row["comparisons"][-1]["within"]


def test_float32_allows_a_millionth() -> None:
    same = ([2.0, 2.0], 0.0)
    close, apart = ([2.0, 2.0 + 1.9e-6], 9e-7), ([2.0, 2.0 + 2.1e-6], 9e-7)
    row = mode_row("float32", eager=same, eager_again=same, compiled=close, captured=apart)
    assert verdicts(row) == {"compiled against eager": True, "captured against eager": False}


def test_a_mode_that_was_given_up_is_no_proof() -> None:
    same = ([2.0, 2.0], 0.0)
    row = mode_row(eager=same, captured=same)
    row["arms"]["captured"]["ran"] = "compiled"
    assert verdicts(row) == {"captured against eager": True}
    assert verdicts(compared(row)) == {"captured against eager": False}


def adapters_row(**held_out: float) -> dict[str, Any]:
    named = {name.replace("_", "-"): loss for name, loss in held_out.items()}
    arms = {
        name: {"start": name[-6:] == "seed-1", "order": 0, "held_out": {"0": 3.0, "50": 2.0, "100": loss}}
        for name, loss in named.items()
    }
    return compared({"part": "adapters", "arms": arms})


@pytest.mark.parametrize(
    ("ours", "peft", "second", "exact", "within"),
    [
        (1.005, 1.0, 0.994, 1.004, (True, True)),
        (1.007, 1.0, 0.994, 1.004, (False, True)),
        (0.995, 1.0, 1.006, 1.004, (True, False)),
    ],
)
def test_verdicts_on_adapters(ours: float, peft: float, second: float, exact: float, within: tuple[bool, bool]) -> None:
    row = adapters_row(slipstream=ours, peft=peft, peft_seed_1=second, float32=exact)
    assert tuple(verdicts(row).values()) == within
    assert list(verdicts(row)) == ["slipstream against peft", "slipstream against float32"]


def test_other_rows_or_weights_are_no_proof() -> None:
    row = adapters_row(slipstream=1.0, float32=1.0)
    assert verdicts(row) == {"slipstream against float32": True}
    row["arms"]["float32"]["order"] = 1
    assert verdicts(compared(row)) == {"slipstream against float32": False}


def test_results_of_other_trainings_are_not_merged() -> None:
    document = {"benchmark": "learning", "device": "d", "versions": {}, "commit": "c", "command": "x"}
    one, other = ({**document, "rows": [{"part": "modes", "steps": steps, "arms": {}}]} for steps in (1, 2))
    with pytest.raises(InputError, match="modes with steps 1 and 2"):
        merged([one, other])
    with pytest.raises(InputError, match="commit is 'c' in one result and 'd' in another"):
        merged([one, {**one, "commit": "d"}])


def test_every_mode_has_an_arm() -> None:
    assert {arm.mode for arm in MODES.values()} == {"eager", "compiled", "captured"}
    assert ADAPTERS["slipstream"].mode == "auto"
    assert ADAPTERS["peft-seed-1"].seed != ADAPTERS["peft"].seed == ADAPTERS["slipstream"].seed
