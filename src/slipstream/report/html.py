"""``report.html``: one self-contained page from a run's records.

Why: a run should be judged, kept and passed on without a server or a tracker: one file, opened from disk, on a phone
too. Whatever is missing in the records is left out and said, so an interrupted run has a report as well. Trade-off: a
page that doesn't update itself. Alternative: a tracker (the recipe's ``train.trackers``), beside it.

1. read     `read_records`
2. reckon   `KeyNumbers.of`
3. compose  header, notes, tiles, figures, tables, each a function of the records
4. write    in one move
"""

from datetime import datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import yaml

from slipstream.report import against_plan, plots
from slipstream.report.against_plan import read_timeline
from slipstream.report.markup import Markup, join, tag
from slipstream.report.numbers import (
    KeyNumbers,
    amount_text,
    bytes_text,
    count_text,
    loss_text,
    number,
    percent_text,
    section,
    time_text,
)
from slipstream.train.records import Records, RunFolder, read_records

OUTCOMES = {"finished": "good", "running": "warn", "interrupted": "warn", "failed": "bad"}


def write_report(run_folder: Path) -> Path:
    """Writes ``report.html`` into a run's folder and returns its path. ``InputError`` where the folder is no run."""
    return remake_report(run_folder)[0]


def remake_report(run_folder: Path) -> tuple[Path, list[str]]:
    """``write_report``, and what the report says is missing in it."""
    folder = RunFolder.open(run_folder)
    records = read_records(folder.path)
    timeline, problems = read_timeline(folder.path)
    records.problems.extend(problems)
    folder.write_report(page(records, folder.path.name, timeline))
    return folder.report, records.problems


def page(records: Records, name: str, timeline: dict[str, Any] | None = None) -> str:
    """The page of a run called ``name``, with the ``timeline`` of one of its steps where one was sampled."""
    numbers = KeyNumbers.of(records)
    body = [
        _header(records, numbers, name),
        _notes(records, numbers),
        _tiles(records, numbers),
        _learning(records, numbers),
        _speed(records, numbers),
        _plan(records, numbers, timeline or {}),
        _packing(records, numbers),
        _decisions(records),
        _pair(_data(records), _versions(records)),
        _recipe(records),
        tag(
            "footer",
            f"Slipstream {records.run.get('slipstream', '')}. Made from run.json, steps.jsonl and evals.jsonl; "
            "slipstream report makes it again.",
        ),
    ]
    files = resources.files("slipstream.report")
    style = files.joinpath("report.css").read_text(encoding="utf-8")
    template = Template(files.joinpath("page.html").read_text(encoding="utf-8"))
    title = join(f"{_model(records)[1]} · {name} · Slipstream")
    return template.substitute(title=title, style=style, body="\n".join(part for part in body if part))


# --------------------------------------------------------------------------------------------------------------- header


def _model(records: Records) -> tuple[str, str]:
    """The model as the recipe names it, and its last part."""
    whole = str(section(records.run, "recipe").get("model") or "Unknown model")
    return whole, whole.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1] or whole


def _header(records: Records, numbers: KeyNumbers, name: str) -> Markup:
    adapter, data = section(records.run, "recipe", "adapter"), section(records.run, "recipe", "data")
    kind = {"lora": f"LoRA, rank {adapter.get('rank', '?')},", "none": "Full fine-tuning"}.get(str(adapter.get("kind")))
    lead = f"{kind or 'Fine-tuned'} on {data.get('train', 'unknown data')}"
    outcome = str(records.run.get("outcome", "unknown"))
    at = "" if outcome == "finished" else f" at step {numbers.steps:,}" if numbers.steps else " before the first step"
    device = section(records.run, "device")
    facts = [
        tag("span", f"{outcome.capitalize()}{at}", class_=f"status {OUTCOMES.get(outcome, 'warn')}"),
        tag("span", _date(records)),
        tag("span", str(device.get("name") or device.get("kind") or "unknown device")),
        *([tag("span", text)] if (text := _parameters(records)) else []),
    ]
    return tag(
        "header",
        tag("p", f"Training run {name}", class_="eyebrow"),
        tag("h1", _model(records)[1], title=_model(records)[0]),
        tag("p", lead, class_="lead"),
        tag("div", *facts, class_="facts"),
    )


def _date(records: Records) -> str:
    started = str(records.run.get("started") or "")
    try:
        time = datetime.fromisoformat(started)
    except ValueError:
        return started or "unknown date"
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".strip()


def _parameters(records: Records) -> str:
    counts = section(records.run, "parameters")
    trainable, total = number(counts.get("trainable")), number(counts.get("total"))
    if trainable is None or not total:
        return ""
    return f"{trainable:,.0f} of {total:,.0f} parameters trained ({percent_text(trainable / total)})"


def _notes(records: Records, numbers: KeyNumbers) -> Markup:
    notes = []
    if numbers.nonfinite:
        steps = amount_text(len(records.steps), "step")
        where = f"{len(numbers.nonfinite):,} of {steps}, first at step {numbers.nonfinite[0]:,}"
        text = f" in {where}. The curves leave these steps out; see steps.jsonl."
        notes.append(
            tag("div", tag("strong", "The loss was not a finite number"), text, class_="note bad", role="note")
        )
    if records.problems:
        listed = tag("ul", *(tag("li", problem) for problem in records.problems))
        notes.append(tag("div", tag("strong", "This report is incomplete."), listed, class_="note", role="note"))
    return join(*notes)


# ---------------------------------------------------------------------------------------------------------- key numbers


def _tiles(records: Records, numbers: KeyNumbers) -> Markup:
    total = number(section(records.run, "device").get("memory_bytes"))
    per_second = numbers.tokens_per_second
    tiles = [
        _tile("Held-out loss", _change(numbers.eval_before, numbers.eval_after), _best(records, numbers)),
        _tile("Training loss", _change(numbers.loss_first, numbers.loss_last), "first step → last step"),
        _tile("Speed", join(count_text(per_second)), _speed_aside(records)),
        _tile("Peak memory", join(bytes_text(numbers.peak_bytes)), _of_device(numbers.peak_bytes, total)),
        _packing_tile(numbers),
        _tile("Training time", join(time_text(numbers.seconds)), _counted(records)),
    ]
    return tag("dl", *tiles, class_="tiles")


def _tile(name: str, value: Markup, aside: str) -> Markup:
    return tag(
        "div",
        tag("dt", name),
        tag("dd", value, class_="value"),
        tag("dd", aside, class_="aside"),
        class_="card tile",
    )


def _speed_aside(records: Records) -> str:
    share = against_plan.floor_share(records)
    floor = "" if share is None else f"; {percent_text(share)} of the matrix-product limit"
    return f"tokens/s, median step, padding not counted{floor}"


def _change(first: float | None, last: float | None) -> Markup:
    if first is None and last is None:
        return join("–")
    return join(tag("span", f"{loss_text(first)} → ", class_="from"), loss_text(last))


def _best(records: Records, numbers: KeyNumbers) -> str:
    best = section(records.run, "best")
    step, loss = number(best.get("step")), number(best.get("loss"))
    if step is not None and loss is not None:
        return f"best {loss_text(loss)}, at step {step:,.0f}"
    return "not measured" if numbers.eval_before is None and numbers.eval_after is None else "before → after"


def _packing_tile(numbers: KeyNumbers) -> Markup:
    if numbers.packed:
        aside = "not recorded" if numbers.fill is None else "of the tokens computed are documents"
        return _tile("Packing fill", join(percent_text(numbers.fill)), aside)
    aside = "not recorded" if numbers.padding_share is None else "of the tokens computed; not packed"
    return _tile("Padding", join(percent_text(numbers.padding_share)), aside)


def _counted(records: Records) -> str:
    return f"{amount_text(len(records.steps), 'step')}, {amount_text(len(records.evals), 'evaluation')}"


def _of_device(peak: float | None, total: float | None) -> str:
    if peak is None:
        return "not measured on this device"
    return f"of {bytes_text(total)}" if total else "on the device"


# -------------------------------------------------------------------------------------------------------------- figures


def _section(title: str, *children: Markup, class_: str) -> Markup:
    return tag("section", tag("h2", title), tag("div", *children, class_=class_))


def _figures(title: str, *figures: plots.Plot) -> Markup:
    if len(figures) > 1:
        return _section(title, *(figure.html() for figure in figures), class_="figures")
    return _section(title, figures[0].alone().html(), class_="figures single")


def _learning(records: Records, numbers: KeyNumbers) -> Markup:
    if not records.steps:
        return Markup()
    first, last = loss_text(numbers.loss_first), loss_text(numbers.loss_last)
    summary = f"Loss for each learned token: {first} at the first step, {last} at the last."
    if numbers.eval_before is not None and numbers.eval_after is not None:
        summary += f" On held-out data {loss_text(numbers.eval_before)} before, {loss_text(numbers.eval_after)} after."
    return _figures("Learning", plots.learning(records.steps, records.evals, summary))


def _speed(records: Records, numbers: KeyNumbers) -> Markup:
    if numbers.tokens_per_second is None:
        return Markup()
    text = f"Document tokens a second, padding not counted; {count_text(numbers.tokens_per_second)} in the median step."
    figures = [plots.throughput(records.steps, text)]
    if numbers.peak_bytes is not None:
        text = f"Peak so far, at each step; {bytes_text(numbers.peak_bytes)} in the end."
        figures.append(plots.memory(records.steps, text))
    return _figures("Speed and memory" if len(figures) > 1 else "Speed", *figures)


def _plan(records: Records, numbers: KeyNumbers, timeline: dict[str, Any]) -> Markup:
    table = against_plan.comparison(records, numbers)
    figures = [against_plan.memory_by_part(records, numbers), against_plan.timeline_figure(timeline)]
    drawn = [figure for figure in figures if figure is not None]
    told = _section("Plan and run", table, class_="card") if table else Markup()
    return join(told, _figures("Where memory and time went", *drawn) if drawn else Markup())


def _packing(records: Records, numbers: KeyNumbers) -> Markup:
    packing = section(records.run, "packing", "train")
    tokens, padding, padded, documents, rows, capacity = (
        number(packing.get(key))
        for key in ("tokens", "padding_tokens", "padded_tokens", "documents", "rows", "capacity")
    )
    if not numbers.packed:
        histogram = _histogram(packing, _not_packed(documents, numbers.padding_share))
        return _figures("Documents", *histogram) if histogram else Markup()
    figures = []
    if tokens and padding is not None and padded is not None:
        text = (
            f"{amount_text(documents, 'document')} in {amount_text(rows, 'row')} of {count_text(capacity)} tokens "
            f"{'leaves' if documents == 1 else 'leave'} {amount_text(padding, 'token')} of padding. "
            f"{_saving(numbers.padding_factor)}"
        )
        figures.append(plots.padding(tokens, tokens + padding, padded, text))
    figures.extend(_histogram(packing))
    return _figures("Packing", *figures) if figures else Markup()


def _saving(factor: float | None) -> str:
    if factor is None:
        return ""
    if factor <= 1:
        return "Padding would have computed no more tokens than packing."
    return f"Padding would have computed {factor:.2f} times as many tokens."


def _not_packed(documents: float | None, padding_share: float | None) -> str:
    cost = "" if padding_share is None else f"; {percent_text(padding_share)} of the tokens computed were padding"
    return f"Not packed: {amount_text(documents, 'document')}, one a row{cost}. "


def _histogram(packing: dict[str, Any], lead: str = "") -> list[plots.Plot]:
    histogram = section(packing, "length_histogram")
    edges, counts = histogram.get("edges"), histogram.get("counts")
    if not isinstance(edges, list) or not isinstance(counts, list) or not counts or len(edges) != len(counts) + 1:
        return []
    if any(number(value) is None for value in edges + counts):
        return []
    fullest = max(range(len(counts)), key=counts.__getitem__)
    text = f"{lead}Most often between {count_text(edges[fullest])} and {count_text(edges[fullest + 1])} tokens."
    return [plots.lengths(edges, counts, text)]


# --------------------------------------------------------------------------------------------------------------- tables


def _decisions(records: Records) -> Markup:
    decisions = records.run.get("decisions")
    if not isinstance(decisions, list) or not decisions:
        return Markup()
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in ("What", "State", "Why"))))
    rows = [_decision(item) for item in decisions if isinstance(item, dict)]
    return _section("Decisions", tag("table", head, tag("tbody", *rows), class_="decisions"), class_="card")


def _decision(item: dict[str, Any]) -> Markup:
    state = ("on", "good") if item.get("on") else ("off", "off")
    return tag(
        "tr",
        tag("th", str(item.get("name", "?")), scope="row"),
        tag("td", state[0], class_=f"switch {state[1]}"),
        tag("td", str(item.get("reason", ""))),
    )


def _data(records: Records) -> Markup:
    accounts = {name: account for name in ("train", "eval") if (account := section(records.run, "data", name))}
    if not accounts:
        return Markup()
    titles = {"train": "Training", "eval": "Held out"}
    keys = list(dict.fromkeys(key for account in accounts.values() for key in account))
    amounts = [key for key in keys if any(number(account.get(key)) is not None for account in accounts.values())]
    columns = [tag("th", titles[name], scope="col", class_="amount") for name in accounts]
    rows = [
        tag(
            "tr",
            tag("th", _words(key), scope="row"),
            *(tag("td", count_text(number(account.get(key))), class_="amount") for account in accounts.values()),
        )
        for key in amounts
    ]
    table = tag("table", tag("thead", tag("tr", tag("th", "", scope="col"), *columns)), tag("tbody", *rows))
    remarks = [
        tag("li", f"{titles[name]}, {remark}")
        for name, account in accounts.items()
        for key, value in account.items()
        if key not in amounts and value
        for remark in _remarks(key, value)
    ]
    more = [tag("ul", *remarks, class_="remarks")] if remarks else []
    return _section("Data", table, *more, class_="card")


def _remarks(key: str, value: Any) -> list[str]:
    """What the account holds besides amounts, in words; bad rows one by one."""
    if key == "bad" and isinstance(value, list) and all(isinstance(item, list) and len(item) == 2 for item in value):
        return [f"row {row}: {reason}" for row, reason in value]
    return [f"{_words(key).lower()}: {_plain(value)}"]


def _words(key: str) -> str:
    return key.replace("_", " ").capitalize()


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_plain(item) for item in value)
    return str(value)


def _versions(records: Records) -> Markup:
    versions = section(records.run, "versions")
    if not versions:
        return Markup()
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", "absent" if value is None else str(value)))
        for name, value in versions.items()
    ]
    return _section("Versions", tag("table", tag("tbody", *rows)), class_="card")


def _recipe(records: Records) -> Markup:
    recipe = section(records.run, "recipe")
    if not recipe:
        return Markup()
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100)
    return _section("Recipe", tag("pre", text, tabindex="0"), class_="card")


def _pair(first: Markup, second: Markup) -> Markup:
    """Two sections side by side, where both are there."""
    return tag("div", first, second, class_="pair") if first and second else join(first, second)
