"""Predictions beside measurements, and a step's timeline, from whatever the records hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from report.test_html import Page, report_of, run_record, step
from slipstream.report.html import write_report

PLAN = {
    "memory": {"device": [{"name": "weights", "bytes": 2**30}, {"name": "activations", "bytes": 2**31}], "host": []},
    "device_bytes": 3 * 2**30,
    "step_seconds": 0.4,
    "floor_seconds": 0.05,
    "seconds": 20.0,
    "tokens_per_second": 10_000.0,
}
TIMELINE = {
    "step": 12,
    "milliseconds": 500.0,
    "lanes": {"compute": [[0.0, 200.0], [300.0, 100.0]], "launches": [[0.0, 450.0]], "waits": [[450.0, 50.0]]},
    "busy": {"compute": 0.6, "launches": 0.9, "waits": 0.1},
    "events": {"compute": 900, "launches": 950, "waits": 1},
}


def page_of(folder: Path, plan: Any, timeline: str | None = None) -> Page:
    steps = [step(n, memory_bytes=3 * 2**30) for n in range(1, 11)]
    text = report_of(folder, run_record(plan=plan), steps)
    if timeline is not None:
        (folder / "timeline.json").write_text(timeline)
        text = write_report(folder).read_text(encoding="utf-8")
    return Page(text)


def labels(page: Page) -> list[str]:
    return [str(a["aria-label"]) for _, a in page.elements if str(a.get("class", "")).startswith("plot ")]


def test_predicted_and_measured_with_their_ratio(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", PLAN)
    assert "Device memory at the peak 3.0 GiB 3.0 GiB 1.00" in page.text
    assert "A step 400 ms 500 ms 1.25" in page.text
    assert "Tokens a second 10,000 8,000 0.80" in page.text
    assert "10.0% of the matrix-product limit" in page.text
    assert "The matrix-product limit: a step that did nothing but multiply with the model's weights" in page.text
    assert "would take 50 ms, 10.0% of the median step" in page.text
    assert any(label.startswith("Memory by part. ") and "3.0 GiB were measured" in label for label in labels(page))


def test_a_timeline_of_one_step(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", PLAN, json.dumps(TIMELINE))
    (label, _) = [label for label in labels(page) if label.startswith("One step. ")]
    assert "Step 12 took 500 ms" in label
    assert "compute 60.0%, launches 90.0%, waits 10.0%" in label
    assert "waited for the device 1 time." in label
    for lane in ("compute", "launches", "waits"):
        assert lane in page.text


@pytest.mark.parametrize("plan", [None, 3, [], {}, {"memory": {"device": [3, {"bytes": "x"}]}, "step_seconds": None}])
def test_without_a_plan_nothing_is_said_of_one(tmp_path: Path, plan: Any) -> None:
    page = page_of(tmp_path / "run", plan)
    assert "Plan and run" not in page.text
    assert "matrix-product limit" not in page.text
    assert not any(label.startswith(("Memory by part", "One step")) for label in labels(page))


def test_a_prediction_that_could_not_be_made_says_why(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run", {"missing": "<b>no</b> head"})
    assert "No prediction was made: <b>no</b> head" in page.text


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"lanes": 3}', '{"lanes": {"compute": [["x", 1], 5]}, "milliseconds": 1}']
)
def test_a_damaged_timeline_is_left_out(tmp_path: Path, text: str) -> None:
    page = page_of(tmp_path / "run", PLAN, text)
    assert not any(label.startswith("One step") for label in labels(page))
    assert "Plan and run" in page.text
    assert ("timeline is left out" in page.text) == (text in ("{", "[]"))


@pytest.mark.parametrize(
    ("outcome", "ending", "told"), [("finished", "", False), ("interrupted", "", True), ("finished", '{"st', True)]
)
def test_a_part_of_a_training_is_not_set_beside_the_whole(
    tmp_path: Path, outcome: str, ending: str, told: bool
) -> None:
    folder = tmp_path / "run"
    report_of(folder, run_record(plan=PLAN, outcome=outcome), [step(n) for n in range(1, 11)])
    with (folder / "steps.jsonl").open("a") as lines:
        lines.write(ending)
    text = Page(write_report(folder).read_text(encoding="utf-8")).text
    row = text[text.index("Training, with evaluations") :]
    assert row.startswith("Training, with evaluations 20.0 s not measured") == told
