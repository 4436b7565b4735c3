"""The published tables, with ours beside them: the newest result that has the same measurement, and its file's name."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from page_numbers import percent, scalar, seconds
from page_results import gain_of, gain_told
from slipstream.generated_page import markdown_table

SOURCE = "an engineering post of May 2026 by Unsloth with NVIDIA"
PACKING = (
    ("Llama-3.2-1B", "llama-3.2-1b", 16, 0.206, 0.199, 0.115),
    ("Qwen3-0.6B", "qwen3-0.6b", 28, 0.370, 0.319, 0.148),
)
METADATA_CALL, MASK_BUILD = 0.0002, 0.0137
"""Seconds of one host-visible metadata call, and of one mask build at 2,048 tokens."""
QLORA = (("forward", 0.433), ("backward", 0.058), ("whole", 0.143))
"""Gains of Qwen3-14B QLoRA by part of the step."""
OFFLOAD = (
    ("8B dense", "qwen3-8b", 49_152, "0.3739 → 0.4053", 0.0840, 0.37e9, 0.207),
    ("14B dense", "qwen3-14b", 49_152, "0.2245 → 0.2395", 0.0670, 0.47e9, 0.279),
    ("32B dense", "qwen3-32b", 24_576, "0.1979 → 0.2070", 0.0461, 0.23e9, 0.222),
)
"""With the row in which one layer's input has about the size of the published extra memory."""
LINK = 55.7e9
"""Bytes a second, pinned host to device: the published extra memory at this rate is one reload."""
RELOADS = {"qwen3-8b": (0.0066, 31), "qwen3-14b": (0.0084, 33), "qwen3-32b": (0.0041, 54)}
"""Seconds of a reload, and how many hidden ones the saved time equals."""
EXPERTS = (
    ("routing and experts, forward", "layer", "forward", "+23%"),
    ("routing and experts, backward", "layer", "backward", "+13%"),
    ("whole step of gpt-oss, adapters on attention", "step", "whole", "+10% to +15%"),
)
Results = Mapping[str, Mapping[str, Any]]
Found = tuple[str, Mapping[str, Any], Mapping[str, Any]]
"""A result's name, its row, and a comparison of it."""


def published(results: Results) -> str:
    """Every published table."""
    parts = [
        f"## Published, and ours\n\nPublished figures: {SOURCE}. Other devices give other milliseconds; formulas and "
        "ratios are what must come out. *File* is where ours comes from; its section below has device, versions, "
        "commit and command. A dash: not measured yet.\n",
        "### Boundaries of packed batches, built once\n",
        "What is built, at 2,048 tokens; ours in each of the models below:\n",
        _builds(results),
        "The dense mask of SDPA at 2,048 tokens, built once a batch instead of in every layer, against a mask made "
        "document by document. A whole step of ours varies by as much as is saved; its forward does less.\n",
        _packing(results),
        "Qwen3-14B QLoRA, gain by part of the step (published without saying which attention):\n",
        _qlora(results),
        "### Reloads of offloaded activations, two buffers against one\n",
        "Ours are of rows in which one layer's input is about as large as the published extra memory, and of fewer "
        "layers where the table says so: compare gains, not milliseconds.\n",
        _offload(results),
        "The same in reloads: the link, one reload (*c*), and how many hidden reloads the saved time equals; predicted "
        "backward times of the layers with one buffer and two, and the share of copy time hidden with two.\n",
        _reloads(results),
        "### Experts by one sort, against a loop\n",
        markdown_table(["what", "published gain", "our gain", "rounds", "file"], _experts_rows(results)),
        "### All three together\n",
        "Published as +25% in one edition and +15% in another.\n",
        _together(results),
    ]
    return "\n".join(parts)


def _builds(results: Results) -> str:
    names = {"a metadata call": ("metadata", METADATA_CALL), "a mask, vectorised": ("rebuild-vectorised", MASK_BUILD)}
    names["a mask, document by document"] = ("rebuild-loop", MASK_BUILD)
    rows = []
    for what, (key, told) in names.items():
        cells = [_build(results, shape, key) for _, shape, *_ in PACKING]
        rows.append([what, seconds(told), *(cell for pair in cells for cell in pair)])
    ours = [word for model, *_ in PACKING for word in (f"ours: {model}", "file")]
    return markdown_table(["what", "published", *ours], rows)


def _build(results: Results, shape: str, key: str) -> tuple[str, str]:
    name, row, _ = newest(results, "packing", {"shape": shape, "tokens": 2048, "attention": "sdpa"}, {"part": "whole"})
    return seconds(row.get("builds", {}).get(key)), _file(name)


def _packing(results: Results) -> str:
    told = ["model", "layers", "published: predicted", "saved", "of the step"]
    ours = ["ours: part", "predicted", "saved", "95% interval", "of the part", "saved / predicted", "file"]
    return markdown_table([*told, *ours], _packing_rows(results))


def _packing_rows(results: Results) -> Iterable[list[str]]:
    for model, shape, layers, predicted, saved, share in PACKING:
        told = [model, str(layers), seconds(predicted), seconds(saved), f"{share:.1%}"]
        for part in ("whole", "forward"):
            row = {"shape": shape, "tokens": 2048, "attention": "sdpa", "recompute": False}
            name, _, ours = newest(results, "packing", row, {"part": part, "against": "wasteful-loop"})
            low_high = f"{seconds(ours['saved_low'])} to {seconds(ours['saved_high'])}" if "saved_low" in ours else "–"
            noise = " (noise)" if ours and ours["saved_low"] <= 0 <= ours["saved_high"] else ""
            mine = [seconds(ours.get("predicted_seconds")), seconds(ours.get("saved_seconds")) + noise, low_high]
            mine += [scalar(key, ours.get(key)) for key in ("share", "ratio")]
            yield [*(told if part == "whole" else [""] * len(told)), part, *mine, _file(name)]


def _qlora(results: Results) -> str:
    rows = []
    for part, gain in QLORA:
        asked = {"part": part, "against": "wasteful-loop"}
        nf4 = {"shape": "qwen3-14b", "dtype": "nf4"}
        name, row, ours = newest(results, "packing", {**nf4, "attention": "sdpa"}, asked)
        if not ours:
            name, row, ours = newest(results, "packing", nf4, {**asked, "against": "wasteful-vectorised"})
        way = f"{row['attention']}, {'recomputed' if row['recompute'] else 'kept'}" if row else "–"
        rows.append([part, percent(gain), gain_told(ours), way, _file(name)])
    return markdown_table(["part", "published gain", "our gain", "ours with", "file"], rows)


def _offload(results: Results) -> str:
    told = ["model", "published: steps/s", "gain", "extra memory", "saved a step"]
    return markdown_table(
        [*told, "ours: layers", "gain", "extra memory", "saved a step", "file"], _offload_rows(results)
    )


def _offload_rows(results: Results) -> Iterable[list[str]]:
    for model, shape, tokens, speed, gain, extra, saved in OFFLOAD:
        asked = {"arm": "offload-2", "against": "offload-1", "part": "whole"}
        name, row, ours = newest(results, "offload", {"shape": shape, "tokens": tokens}, asked)
        told = [speed, percent(gain, 2), scalar("bytes", extra), seconds(saved)]
        mine = [
            scalar("", row.get("layers")),
            "–" if not ours else percent(gain_of(ours) or 0.0, 2),
            _extra(row),
            seconds(ours.get("saved_seconds")),
        ]
        yield [model, *told, *mine, _file(name)]


def _reloads(results: Results) -> str:
    told = ["model", "published: link", "a reload", "hidden reloads"]
    ours = ["ours: link", "a reload (c)", "hidden reloads", "of", "T_single, predicted", "T_double, predicted"]
    return markdown_table([*told, *ours, "copies hidden", "file"], _reload_rows(results))


def _reload_rows(results: Results) -> Iterable[list[str]]:
    for model, shape, tokens, *_ in OFFLOAD:
        reload, hidden = RELOADS[shape]
        asked = {"arm": "offload-2", "against": "offload-1", "part": "whole"}
        name, row, ours = newest(results, "offload", {"shape": shape, "tokens": tokens}, asked)
        link, c, predicted = (row.get(key, {}) for key in ("link_bytes_per_second", "c", "predicted"))
        traced = row.get("arms", {}).get("offload-2", {}).get("copies", {}).get("traced", {})
        yield [
            model,
            *(_gb_a_second(LINK), seconds(reload), str(hidden)),
            _gb_a_second(link["back"]) if link else "–",
            seconds(c or None),
            f"{ours['saved_seconds'] / c:.1f}" if ours and c else "–",
            scalar("", row["layers"] - 1) if row else "–",
            *(seconds(predicted.get(key)) if predicted else "–" for key in ("T_single", "T_double")),
            f"{traced['both']['hidden_share']:.1%}" if "both" in traced else "–",
            _file(name),
        ]


def _extra(row: Mapping[str, Any]) -> str:
    """What the second buffer takes more at the peak."""
    arms = row.get("arms", {})
    one, two = (arms.get(name, {}).get("peak_bytes") for name in ("offload-1", "offload-2"))
    return "–" if one is None or two is None else scalar("bytes", two - one)


def _experts_rows(results: Results) -> Iterable[list[str]]:
    for words, part, of, told in EXPERTS:
        row = {"part": part, "shape": "gpt-oss-20b", **({"adapters": "attention"} if part == "step" else {})}
        asked = {"ours": "sorted-loop", "against": "where-loop", "part": of}
        name, found, ours = newest(results, "experts", row, asked)
        yield [words, told, gain_told(ours), scalar("", found.get("rounds")), _file(name)]


def _together(results: Results) -> str:
    rows = []
    for shape, kind in (("gpt-oss-20b", "mixture: all three"), ("qwen3-8b", "dense: packing and reload")):
        name, row, ours = newest(results, "all", {"shape": shape}, {"arm": "published"})
        interval = f"{percent(ours['gain_low'])} to {percent(ours['gain_high'])}" if ours else "–"
        product = scalar("gain", ours.get("product_gain")) + _of_noise(row)
        rows.append([shape, kind, "+15% / +25%", gain_told(ours), interval, product, _file(name)])
    head = ["shape", "what applies", "published gain", "our gain", "95% interval", "product of the parts", "file"]
    return markdown_table(head, rows)


def _gb_a_second(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"


def _of_noise(row: Mapping[str, Any]) -> str:
    """Which of the published parts, alone, could not be told from nothing: their product says as little."""
    parts = [one for one in row.get("comparisons", ()) if one["arm"] in ("packing", "reload", "experts")]
    noise = [one["arm"] for one in parts if "gain_low" in one and one["gain_low"] <= 0 <= one["gain_high"]]
    return f" (noise: {', '.join(noise)})" if noise else ""


def _file(name: str) -> str:
    return f"`{name}`" if name else "–"


def newest(results: Results, benchmark: str, row: Mapping[str, Any], asked: Mapping[str, Any]) -> Found:
    """The newest comparison like ``asked`` in a row like ``row``; empty where there is none."""
    found = list(_all(results, benchmark, row, asked))
    return max(found, key=lambda one: str(results[one[0]].get("date", "")), default=("", {}, {}))


def _all(results: Results, benchmark: str, row: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[Found]:
    for name, result in results.items():
        for candidate in rows_of(result) if result.get("benchmark") == benchmark else ():
            if _like(candidate, row):
                yield from ((name, candidate, one) for one in candidate.get("comparisons", ()) if _like(one, asked))


def rows_of(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """A result's rows."""
    return [row for row in result.get("rows", []) if isinstance(row, dict)]


def _like(found: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    return all(found.get(key) == value for key, value in asked.items())
