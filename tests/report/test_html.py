"""The report: everything in one file, everything escaped, and something sensible from whatever records there are."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from powers import rights_hold
from slipstream.errors import InputError
from slipstream.report.html import write_report
from slipstream.report.markup import Markup, join, tag
from slipstream.report.numbers import KeyNumbers, binned, bytes_text, percent_text, smoothed, time_text
from slipstream.train.records import EvalLog, EvalRecord, Records, RunFolder, StepRecord, to_line

EVIL = "<script>alert('x')</script>&\"$body"
VOID = {"meta", "br"}


def step(number: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": number,
        "epoch": number / 50,
        "loss": 1.5 + 1 / number,
        "grad_norm": 1.0,
        "learning_rate": 2e-4,
        "tokens": 4000,
        "learned_tokens": 1500,
        "documents": 20,
        "padding_tokens": 96,
        "seconds": 0.5,
        "memory_bytes": 3 * 2**30,
    }
    return StepRecord(**values | changes)


def run_record(**changes: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "slipstream": "0.1.0",
        "started": "2026-05-04T10:12:00+00:00",
        "finished": "2026-05-04T10:16:22+00:00",
        "outcome": "finished",
        "recipe": {"model": "Qwen/Qwen3-0.6B", "adapter": {"kind": "lora", "rank": 16}, "data": {"train": "d.jsonl"}},
        "versions": {"torch": "2.13.0"},
        "device": {"kind": "cuda", "name": "NVIDIA H200", "memory_bytes": 150 * 10**9},
        "decisions": [{"name": "attention", "on": True, "reason": "varlen on CUDA"}],
        "data": {"train": {"rows_read": 1234, "rows_bad": 1, "bad": [[17, "no field"], [90, "empty"]]}, "eval": None},
        "packing": {"train": None, "eval": None},
        "parameters": {"trainable": 1_000_000, "total": 100_000_000},
        "eval_before": 2.75,
        "eval_after": 1.625,
        "best": {"step": 50, "loss": 1.5625},
    } | changes


def report_of(path: Path, run: dict[str, Any] | str, steps: list[StepRecord], evals: list[EvalRecord] = []) -> str:  # noqa: B006
    folder = RunFolder.create(path)
    folder.run_json.write_text(run if isinstance(run, str) else json.dumps(run))
    folder.steps.write_text("".join(map(to_line, steps)))
    for record in evals:
        EvalLog(folder.evals).append(record)
    return write_report(folder.path).read_text(encoding="utf-8")


PACKING = {
    "documents": 1000,
    "tokens": 200_000,
    "rows": 50,
    "capacity": 4096,
    "fill": 0.97656,
    "padding_tokens": 4800,
    "padded_tokens": 614_400,
    "length_histogram": {"edges": [16, 64, 256, 1024], "counts": [10, 80, 30]},
}


class Page(HTMLParser):
    """Checks nesting; collects elements, ids and visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attrs)))
        self.ids.extend(str(value) for key, value in attrs if key == "id")
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attrs)))
        self.ids.extend(str(value) for key, value in attrs if key == "id")

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    evals = [EvalRecord(0, 2.75, 900, 1.0), EvalRecord(50, 1.625, 900, 1.0)]
    return report_of(
        tmp_path_factory.mktemp("runs") / "first",
        run_record(packing={"train": PACKING}),
        [step(n) for n in range(1, 51)],
        evals,
    )


def test_a_whole_run_shows_its_numbers(whole: str) -> None:
    text = Page(whole).text
    for shown in (
        "Qwen3-0.6B",
        "LoRA, rank 16, on d.jsonl",
        "Finished",
        "2026-05-04 10:12 UTC",
        "NVIDIA H200",
        "2.750 → 1.625",
        "best 1.562, at step 50",
        "2.500 → 1.520",
        "8,000",
        "3.0 GiB",
        "of 139.7 GiB",
        "97.7%",
        "27.0 s 50 steps, 2 evaluations",
        "Padding would have computed 3.00 times as many tokens.",
        "Most often between 64 and 256 tokens.",
        "varlen on CUDA",
        "1,234",
        "Training, row 17: no field Training, row 90: empty",
        "1,000,000 of 100,000,000 parameters trained (1.0%)",
        "rank: 16",
        "2.13.0",
    ):
        assert shown in text, shown
    assert "incomplete" not in text


def test_nothing_comes_from_elsewhere(whole: str) -> None:
    page = Page(whole)
    assert not {"script", "link", "img", "iframe", "image"} & {name for name, _ in page.elements}
    links = [value for _, attributes in page.elements for key, value in attributes.items() if key in ("href", "src")]
    assert all(str(link).startswith("#") for link in links)
    links = [str(attributes.get("xlink:href", "#")) for _, attributes in page.elements]
    assert all(link.startswith("#") for link in links)
    assert "@import" not in whole
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", whole))


def test_figures_have_titles_words_units_and_ids_of_their_own(whole: str) -> None:
    page = Page(whole)
    plots = [attributes for _, attributes in page.elements if str(attributes.get("class", "")).startswith("plot ")]
    assert len(plots) == 2 * 5, "five figures, wide and narrow"
    assert all(str(plot["aria-label"]).count(".") >= 2 and plot["role"] == "img" for plot in plots)
    assert len(page.ids) == len(set(page.ids)) > 0
    for target in re.findall(r'(?:url\(#|href="#)([^)"]*)', whole):
        assert target in page.ids
    for label in ("loss (nats/token)", "tokens/s", "GiB", "document length (tokens)", "tokens computed in one epoch"):
        assert page.text.count(label) >= 2, label


def test_figures_take_the_pages_colours(whole: str) -> None:
    style = whole[: whole.index("</style>")]
    used = set(re.findall(r"var\(--(\w+)\)", whole[len(style) :]))
    assert {"ink", "muted", "grid", "first", "second"} <= used
    for name in used:
        assert style.count(f"--{name}:") == 2, f"{name} in light and in dark"
    svgs = "".join(re.findall(r"<svg.*?</svg>", whole, flags=re.DOTALL))
    assert svgs
    assert not re.findall(r"(?:fill|stroke): ?#[0-9a-f]{6}", svgs), "a colour that doesn't follow the page"


def test_everything_is_escaped(tmp_path: Path) -> None:
    run = run_record(
        slipstream=EVIL,
        started=EVIL,
        outcome=EVIL,
        recipe={"model": f"models/{EVIL}", "data": {"train": EVIL}, EVIL: EVIL},
        versions={EVIL: EVIL},
        device={"name": EVIL},
        decisions=[{"name": EVIL, "on": False, "reason": EVIL}],
        data={"train": {EVIL: 1, "bad": [[EVIL, EVIL]], "other": [EVIL, {EVIL: EVIL}]}},
    )
    text = report_of(tmp_path / "a<b>&", run, [])
    page = Page(text)
    assert "script" not in {name for name, _ in page.elements}
    assert "b" not in {name for name, _ in page.elements}
    assert page.text.count("<script>alert(") >= 12, "it is shown as text"
    assert "$body" in page.text, "a placeholder in the data is not filled in"


@pytest.mark.parametrize("outcome", ["interrupted", "failed", "running"])
def test_an_unfinished_run_says_where_it_stopped(tmp_path: Path, outcome: str) -> None:
    run = run_record(outcome=outcome, finished=None, eval_after=None, best=None)
    text = Page(report_of(tmp_path / "run", run, [step(n, memory_bytes=None) for n in range(1, 8)])).text
    assert f"{outcome.capitalize()} at step 7" in text
    assert "2.750 → –" in text


def test_incomplete_records_give_a_report_that_says_so(tmp_path: Path) -> None:
    page = Page(report_of(tmp_path / "run", '{"outcome": "interrupted"}', []))
    assert "This report is incomplete." in page.text
    assert "run.json lacks slipstream, started, recipe" in page.text
    assert "Unknown model" in page.text
    assert "svg" not in {name for name, _ in page.elements}
    damaged = Page(report_of(tmp_path / "damaged", "{", [step(1)]))
    assert "cannot be read" in damaged.text
    assert "svg" in {name for name, _ in damaged.elements}, "the steps are shown all the same"


def test_values_of_a_wrong_kind_are_borne(tmp_path: Path) -> None:
    names = (
        "slipstream",
        "started",
        "recipe",
        "versions",
        "device",
        "decisions",
        "data",
        "packing",
        "parameters",
        "best",
    )
    for index, wrong in enumerate(
        (None, 3, "text", ["a"], {"train": 5}, {"train": {"length_histogram": {"edges": "x"}}})
    ):
        run = run_record(**dict.fromkeys(names, wrong))
        assert "Training loss" in Page(report_of(tmp_path / str(index), run, [])).text


def test_a_loss_that_is_not_finite_is_said(tmp_path: Path) -> None:
    steps = [step(n, loss=math.nan if n in (3, 4) else 2.0) for n in range(1, 100)]
    text = Page(report_of(tmp_path / "run", run_record(), steps)).text
    assert "not a finite number in 2 of 99 steps, first at step 3" in text
    assert "nan" not in text.lower()
    every = report_of(tmp_path / "all", run_record(), [step(n, loss=math.inf) for n in (1, 2)])
    assert "in 2 of 2 steps" in Page(every).text


def test_a_last_loss_that_is_not_finite_is_shown_as_it_is(tmp_path: Path) -> None:
    steps = [step(1, loss=2.0), step(2, loss=1.5), step(3, loss=math.nan)]
    text = Page(report_of(tmp_path / "run", run_record(), steps)).text
    assert "Training loss 2.000 → nan" in text
    assert "2.000 at the first step, nan at the last" in text
    assert "1.500" not in text


def test_a_run_that_is_not_packed_claims_no_packing(tmp_path: Path) -> None:
    steps = [step(n, tokens=750, padding_tokens=250) for n in (1, 2)]
    text = Page(report_of(tmp_path / "run", run_record(packing={"train": PACKING | {"enabled": False}}), steps)).text
    assert "Padding 25.0% of the tokens computed; not packed" in text
    assert "Not packed: 1,000 documents, one a row; 25.0% of the tokens computed were padding." in text
    assert "Most often between 64 and 256 tokens." in text
    for claim in ("Packing fill", "97.7%", "in 50 rows", "Packed against padded", "Padding would have"):
        assert claim not in text, claim


def test_one_of_each_is_singular(tmp_path: Path) -> None:
    one = {"documents": 1, "rows": 1, "tokens": 4095, "padding_tokens": 1, "padded_tokens": 4095}
    text = Page(
        report_of(tmp_path / "run", run_record(packing={"train": PACKING | one}), [step(1, loss=math.nan)])
    ).text
    assert "1 document in 1 row of 4,096 tokens leaves 1 token of padding." in text
    assert "in 1 of 1 step, first at step 1" in text


def test_a_library_that_is_not_there_is_absent(tmp_path: Path) -> None:
    text = Page(report_of(tmp_path / "run", run_record(versions={"torch": "2.13.0", "trl": None}), [])).text
    assert "trl absent" in text
    assert "None" not in text


def test_a_device_that_tells_no_memory_has_no_memory_figure(tmp_path: Path) -> None:
    text = Page(report_of(tmp_path / "run", run_record(), [step(1, memory_bytes=None)])).text
    assert "not measured on this device" in text
    assert "Device memory" not in text


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    text = report_of(tmp_path / "run", run_record(), [step(n) for n in range(1, 20_001)])
    assert len(text) < 400_000


def test_the_report_is_the_same_each_time_and_replaces_the_old(tmp_path: Path) -> None:
    first = report_of(tmp_path / "run", run_record(), [step(1), step(2)])
    assert write_report(tmp_path / "run").read_text() == first


def test_no_run_no_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize(
    ("padded", "said"),
    [(204_800, "no more tokens than packing"), (225_280, "1.10 times as many"), (409_600, "2.00 times as many")],
)
def test_what_padding_would_have_cost(tmp_path: Path, padded: int, said: str) -> None:
    run = run_record(packing={"train": PACKING | {"padded_tokens": padded, "length_histogram": None}})
    assert f"Padding would have computed {said}" in Page(report_of(tmp_path / "run", run, [])).text


def test_key_numbers_of_nothing_are_none() -> None:
    numbers = KeyNumbers.of(Records({}))
    assert (numbers.steps, numbers.loss_last, numbers.tokens_per_second, numbers.seconds) == (0, None, None, None)


def test_a_run_that_may_only_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    tmp_path.chmod(0o555)
    told = r"report.html' cannot be written \(Permission denied\); make .* writable to you, or copy"
    with rights_hold(), pytest.raises(InputError, match=told):
        write_report(tmp_path)
    tmp_path.chmod(0o755)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_key_numbers_come_from_the_records() -> None:
    steps = [step(1, seconds=5.0), step(2, seconds=1.0), step(3, seconds=0.5, memory_bytes=7)]
    evals = [EvalRecord(0, 3.0, 10, 1.0), EvalRecord(2, 2.5, 10, 1.0), EvalRecord(3, 2.0, 10, 1.0)]
    numbers = KeyNumbers.of(
        Records(run_record(eval_before=None, eval_after=None, packing={"train": PACKING}), steps, evals)
    )
    assert (numbers.eval_before, numbers.eval_after) == (3.0, 2.0)
    assert numbers.tokens_per_second == 4000, "the median: the slow first step doesn't count"
    assert numbers.peak_bytes == 3 * 2**30
    assert numbers.padding_factor == 3.0
    assert numbers.seconds == 9.5


def test_bins_keep_the_mean_and_pass_over_nan() -> None:
    x, y = binned([1, 2, 3, 4, 5], [1.0, math.nan, 3.0, 5.0, math.nan], most=3)
    assert x == [1.5, 3.5, 5.0]
    assert y[:2] == [1.0, 4.0]
    assert math.isnan(y[2])


def test_smoothing_neither_lags_nor_moves_the_start() -> None:
    line = [float(value) for value in range(20)]
    assert smoothed(line, 3)[:17] == line[:17]
    assert math.isnan(smoothed([1.0, math.nan, 3.0], 1)[1])
    assert smoothed([0.0, 3.0, math.nan, 9.0, 6.0], 1)[3] == 7.5


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (percent_text(0.99999), "99.9%"),
        (percent_text(1.0), "100.0%"),
        (percent_text(0.5), "50.0%"),
        (bytes_text(0), "0 B"),
        (bytes_text(1023), "1023 B"),
        (bytes_text(2**30), "1.0 GiB"),
        (time_text(59.94), "59.9 s"),
        (time_text(59.97), "1 min 00 s"),
        (time_text(3599.7), "1 h 00 min"),
        (time_text(7384), "2 h 03 min"),
    ],
)
def test_numbers_are_written_for_people(shown: str, text: str) -> None:
    assert shown == text


def test_markup_escapes_what_it_did_not_make() -> None:
    assert tag("p", "a<b", tag("i", "&"), class_='"x') == '<p class="&quot;x">a&lt;b<i>&amp;</i></p>'
    assert join(Markup("<b>"), "<b>") == "<b>&lt;b&gt;"
