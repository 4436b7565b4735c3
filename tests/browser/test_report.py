"""The report in a real browser: nothing on its console, nothing wider than the screen, every figure drawn.

Chromium is run headless, once a page, by its command line; nothing drives it from outside. What is asked of a page is
asked by a script in a copy of it, which tells the page around it; the browser prints that. The report lies in a frame,
since no window is as narrow as a phone. Screenshots are kept where ``SLIPSTREAM_SCREENSHOTS`` says, to be looked at.
"""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from report.test_against_plan import PLAN, TIMELINE
from report.test_html import PACKING, report_of, run_record, step
from slipstream.report.html import write_report
from slipstream.train.records import EvalRecord

pytestmark = pytest.mark.browser
NAMES = ("chromium", "chromium-browser", "google-chrome")
HEIGHTS = {1280: 3900, 390: 5100}
"""By width: enough for all of the page."""
SCHEMES = {"dark": 0, "light": 1}
"""As Blink numbers them."""
ASK = """<script>
// Words that stand on two lines: of plain words, since paths and digests may be broken anywhere.
function words(elements) {
  const found = [], range = document.createRange();
  const texts = [...elements].filter(one => !one.closest("pre, svg")).flatMap(one => [...one.childNodes]);
  for (const text of texts.filter(one => one.nodeType == Node.TEXT_NODE)) {
    for (const word of text.data.matchAll(/[A-Za-z]{2,24}/g)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
      if (lines.size > 1) found.push(word[0]);
    }
  }
  return found;
}
addEventListener("load", () => {
  const shown = [...document.querySelectorAll(".plot")].filter(plot => plot.getClientRects().length);
  const parts = [...document.querySelectorAll("main *")].filter(one => one.getClientRects().length);
  const wide = parts.filter(
    one => !one.closest("pre, svg") && one.getBoundingClientRect().right > innerWidth + 1);
  const drawn = shown.map(plot => plot.querySelector("svg").getBoundingClientRect());
  parent.postMessage(JSON.stringify({
    width: innerWidth, page: document.documentElement.scrollWidth, wide: wide.map(one => one.outerHTML.slice(0, 80)),
    plots: shown.map(plot => plot.getAttribute("aria-label").split(".")[0]),
    figures: document.querySelectorAll("figure").length,
    empty: drawn.filter(box => box.width < 100 || box.height < 40).length,
    ink: getComputedStyle(document.body).color, paper: getComputedStyle(document.body).backgroundColor,
    broken: words(document.querySelectorAll("h1, h2, h3, p, dt, dd, th, td, li, span")),
    small: shown.flatMap(plot => [...plot.querySelectorAll("svg text")]).filter(
      text => text.getClientRects().length && text.getBoundingClientRect().height < 8).length,
  }), "*");
});
</script>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, f"none of {', '.join(NAMES)} is installed; on Debian: apt-get install chromium"
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything that a report can show."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    decisions = [
        {"name": "attention", "on": True, "reason": "varlen: variable-length kernel over cu_seqlens, no T x T mask"},
        {"name": "offload", "on": False, "reason": "the inputs of recomputed layers fit the device"},
        {"name": "several ranks", "on": False, "reason": "one process"},
    ]
    parts = [{"name": name, "bytes": size * 2**27} for name, size in (("weights", 9), ("activations", 14), ("loss", 4))]
    plan = {**PLAN, "seconds": 751.0, "memory": {"device": parts, "host": []}}
    run = run_record(packing={"train": PACKING, "eval": None}, plan=plan, decisions=decisions)
    evals = [EvalRecord(0, 2.75, 900, 1.0), EvalRecord(50, 1.625, 900, 1.0)]
    report_of(folder, run, [step(n, seconds=15.0, learning_rate=2e-4 * (1 - n / 51)) for n in range(1, 51)], evals)
    (folder / "timeline.json").write_text(json.dumps(TIMELINE))
    return write_report(folder)


def browse(chromium: str, page: Path, width: int, scheme: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """The page in a frame of this width; gives what the browser printed and logged."""
    outer, height = page.with_name(f"around-{page.stem}.html"), HEIGHTS[width]
    listen = "<script>addEventListener('message', told => { document.body.dataset.answer = told.data })</script>"
    frame = f'<iframe src="{page.name}" style="border: 0; width: {width}px; height: {height}px"></iframe>'
    outer.write_text(f'<!doctype html><body style="margin: 0">{listen}{frame}</body>')
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += [f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},{height}", *flags]
    command += ["--virtual-time-budget=2000", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    return subprocess.run([*command, outer.as_uri()], capture_output=True, text=True, check=True, timeout=120)


def answers(chromium: str, report: Path, width: int, scheme: str) -> dict[str, Any]:
    """What the page says of itself."""
    asking = report.with_name("asking.html")
    text = re.sub(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", report.read_text(encoding="utf-8"))
    asking.write_text(text.replace("</body>", f"{ASK}</body>"), encoding="utf-8")
    asked = browse(chromium, asking, width, scheme, "--dump-dom")
    (answer,) = re.findall(r'data-answer="([^"]*)"', asked.stdout)
    told: dict[str, Any] = json.loads(html.unescape(answer))
    return told


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", HEIGHTS)
def test_the_report_as_it_is_seen(chromium: str, report: Path, width: int, scheme: str) -> None:
    told = answers(chromium, report, width, scheme)
    assert told["width"] == width
    assert told["page"] <= width, told["wide"]
    assert told["wide"] == []
    assert told["broken"] == []
    assert {"Memory by part", "One step"} <= set(told["plots"])
    assert told["figures"] >= 6
    assert len(told["plots"]) == len(set(told["plots"])) == told["figures"]  # one of each figure's two is shown
    assert (told["empty"], told["small"]) == (0, 0)
    ink, paper = (sum(map(int, re.findall(r"\d+", told[name])[:3])) for name in ("ink", "paper"))
    assert (ink > paper) == (scheme == "dark")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", HEIGHTS)
def test_nothing_on_the_console_and_a_picture(chromium: str, report: Path, width: int, scheme: str) -> None:
    folder = Path(os.environ.get("SLIPSTREAM_SCREENSHOTS", report.parent / "screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"report-{width}-{scheme}.png"
    picture.unlink(missing_ok=True)
    seen = browse(chromium, report, width, scheme, f"--screenshot={picture}")
    assert "CONSOLE" not in seen.stderr
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 50_000


def test_the_console_is_listened_to(chromium: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<script>console.error('heard')</script>")
    assert "heard" in browse(chromium, page, 1280, "light", "--dump-dom").stderr
