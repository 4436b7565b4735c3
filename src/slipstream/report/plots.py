"""The report's figures, as inline SVG that follows the page's colours.

Why: one file that opens without a network, sharp at any size, readable in dark and light. Figures are drawn with
stand-in colours, which become CSS variables of the page, and with text kept as text, so the page's font and colours
apply. Each is drawn twice, wide and narrow, since letters that fit a desktop are too small once scaled to a phone.
Trade-off: twice the SVG (tens of kilobytes). Alternative: a script that draws in the browser, which would have to be
carried along.
"""

import io
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from slipstream.report.markup import Markup, tag
from slipstream.report.numbers import binned, smoothed, speed_of
from slipstream.train.records import EvalRecord, StepRecord

INK, MUTED, GRID, FIRST, SECOND, CARD, EMPTY = (
    "#010203",
    "#020304",
    "#030405",
    "#040506",
    "#050607",
    "#060708",
    "#070809",
)
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", FIRST: "first", SECOND: "second", CARD: "card", EMPTY: "empty"}

Draw = Callable[[Figure], None]


@dataclass(frozen=True)
class Plot:
    """A figure of the page."""

    name: str
    """Unique in the page; prefixes the ids in its SVG."""
    title: str
    summary: str
    """What it shows, in words; also the alternative text."""
    draw: Draw
    wide: tuple[int, int] = (480, 250)
    """Width and height on a desktop, in CSS pixels."""
    narrow: tuple[int, int] = (330, 230)
    """The same on a phone."""

    def alone(self) -> "Plot":
        """The same, drawn for the whole width of a desktop's page."""
        return replace(self, wide=(860, self.wide[1]))

    def html(self) -> Markup:
        """The ``<figure>``, with both drawings; the style sheet shows one."""
        label = f"{self.title}. {self.summary}"
        drawings = [
            tag("div", _svg(self, kind, size), class_=f"plot {kind}", role="img", aria_label=label)
            for kind, size in (("wide", self.wide), ("narrow", self.narrow))
        ]
        caption = tag("figcaption", tag("h3", self.title), tag("p", self.summary))
        return tag("figure", caption, *drawings, class_="card")


def _svg(plot: Plot, kind: str, size: tuple[int, int]) -> Markup:
    name = f"{plot.name}-{kind}"
    options = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 12, "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(options):
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72, layout=ConstrainedLayoutEngine(h_pad=6 / 72))
        figure.patch.set_alpha(0)
        plot.draw(figure)
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return _adapted(buffer.getvalue(), name)


def _adapted(svg: str, name: str) -> Markup:
    """The ``<svg>`` element alone, sized by the page, with ids of its own and the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'^(<svg[^>]*?) height="[^"]*"([^>]*?) width="[^"]*"', r"\1\2", svg, count=1)
    svg = re.sub(r'^(<svg[^>]*?) width="[^"]*"([^>]*?) height="[^"]*"', r"\1\2", svg, count=1)
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)  # a hundredth of a pixel is enough
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    for stand_in, variable in VARIABLES.items():
        svg = svg.replace(stand_in, f"var(--{variable})")
    return Markup(svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1))


# ---------------------------------------------------------------------------------------------------------- the figures


def learning(steps: Sequence[StepRecord], evals: Sequence[EvalRecord], summary: str) -> Plot:
    """Loss over the steps, with evaluations, above the learning rate."""

    def draw(figure: Figure) -> None:
        losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        _draw_loss(losses, steps, evals)
        x, y = binned([step.step for step in steps], [step.learning_rate for step in steps])
        rates.plot(x, y, color=MUTED, linewidth=1.5)
        peak = max((rate for rate in y if rate == rate), default=0) or 1
        rates.set_ylim(0, peak * 1.1)
        style(losses, "", "loss (nats/token)")
        losses.spines["bottom"].set_visible(False)
        style(rates, "step", "learning rate", ticks=2)
        rates.set_yticks([0, peak])
        figure.align_ylabels()

    return Plot("learning", "Loss and learning rate", summary, draw, wide=(480, 340), narrow=(330, 330))


def _draw_loss(axes: Axes, steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> None:
    x, y = binned([step.step for step in steps], [step.loss for step in steps])
    many = len(x) > 40
    axes.plot(x, y, color=FIRST, alpha=0.3 if many else 1, linewidth=1 if many else 1.8, **_dots(x))
    if many:
        axes.plot(x, smoothed(y, max(2, len(x) // 40)), color=FIRST, linewidth=2, label="training, smoothed")
    else:
        axes.lines[0].set_label("training")
    if evals:
        at, losses = [item.step for item in evals], [item.loss for item in evals]
        axes.plot(at, losses, color=SECOND, linewidth=1.5, marker="o", markersize=5, label="held out")
    # on the card's own colour, so that no grid line runs through the words
    words = {"labelcolor": INK, "facecolor": CARD, "edgecolor": "none", "framealpha": 1.0}
    axes.legend(**words, fontsize=12, handlelength=1.6)


def throughput(steps: Sequence[StepRecord], summary: str) -> Plot:
    """Document tokens a second over the steps."""
    x, y = binned([step.step for step in steps], [speed_of(step) for step in steps])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(x, y, color=FIRST, linewidth=1.5, **_dots(x))
        axes.set_ylim(bottom=0)
        style(axes, "step", "tokens/s")

    return Plot("throughput", "Tokens a second", summary, draw)


def memory(steps: Sequence[StepRecord], summary: str) -> Plot:
    """Peak device memory over the steps, of those that know it."""
    known = [(step.step, step.memory_bytes / 1024**3) for step in steps if step.memory_bytes is not None]
    x, y = binned([step for step, _ in known], [size for _, size in known])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(x, y, color=SECOND, linewidth=1.8, **_dots(x))
        axes.fill_between(x, y, color=SECOND, alpha=0.12, linewidth=0)
        axes.set_ylim(bottom=0, top=max(y, default=1) * 1.15 or 1)
        style(axes, "step", "GiB")

    return Plot("memory", "Device memory", summary, draw)


def padding(tokens: float, packed: float, padded: float, summary: str) -> Plot:
    """Tokens computed when packed and when padded; ``tokens`` of each are documents."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.barh([1, 0], [tokens, tokens], height=0.55, color=FIRST, label="documents")
        axes.barh([1, 0], [packed - tokens, padded - tokens], left=tokens, height=0.55, color=EMPTY, label="padding")
        axes.set_yticks([1, 0], ["packed", "padded"])
        axes.set_ylim(-0.55, 1.55)
        style(axes, "tokens computed in one epoch", "", ticks=None)
        axes.grid(visible=False)
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        figure.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=INK, fontsize=12, handlelength=1.2)

    return Plot("padding", "Packed against padded", summary, draw)


def lengths(edges: Sequence[float], counts: Sequence[float], summary: str) -> Plot:
    """Histogram of document lengths; ``edges`` has one entry more than ``counts``."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        widths = [high - low for low, high in itertools.pairwise(edges)]
        axes.bar(edges[:-1], counts, widths, align="edge", color=FIRST, edgecolor=CARD, linewidth=1)
        style(axes, "document length (tokens)", "documents")
        if edges[0] > 0 and edges[-1] / edges[0] > 50:
            axes.set_xscale("log", base=2)
            axes.minorticks_off()
        axes.xaxis.set_major_formatter(FuncFormatter(_short))

    return Plot("lengths", "Document lengths", summary, draw)


def _dots(x: Sequence[float]) -> dict[str, Any]:
    """Markers, where few points would be no line."""
    return {"marker": "o", "markersize": 4} if len(x) <= 40 else {}


def style(axes: Axes, x_label: str, y_label: str, ticks: int | None = 5) -> None:
    """Labels, a light grid and no frame; ``ticks`` of None leaves the vertical axis to the caller."""
    axes.patch.set_alpha(0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.015)
    axes.tick_params(colors=MUTED, length=0, pad=5)
    axes.set_xlabel(x_label, color=MUTED)
    axes.set_ylabel(y_label, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    if ticks is not None:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=ticks))
        axes.yaxis.set_major_formatter(FuncFormatter(_short))


def _short(value: float, _position: int | None = None) -> str:
    """A tick's number: ``20k``, ``1.5M``, ``2e-4``."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):g}{unit}"
    if 0 < abs(value) < 0.01:
        digits, power = f"{value:.1e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:,.10g}"
