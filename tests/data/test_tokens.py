"""Documents of tokens: overlong and bad rows are accounted for to the last token, and nothing is tokenised twice."""

import dataclasses
import errno
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from slipstream.data import tokens as tokens_module
from slipstream.data.account import Account
from slipstream.data.cache import ArrowCache
from slipstream.data.chunks import CHUNK_ROWS
from slipstream.data.packing import pack_dataset
from slipstream.data.rows import DataOptions
from slipstream.data.tokens import TokenisedSet, tokenise
from slipstream.data.workers import AHEAD, in_order
from slipstream.errors import InputError
from tiny import tiny_tokenizer


class Counting(PreTrainedTokenizerFast):
    """Counts its calls."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        type(self).calls += 1
        return super().__call__(*args, **kwargs)


@pytest.fixture
def tokenizer() -> Any:
    return tiny_tokenizer(eos="</s>")


@pytest.fixture
def counting(tokenizer: Any) -> Any:
    Counting.calls = 0
    tokenizer.__class__ = Counting
    return tokenizer


def write(tmp_path: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def made(path: Path, tokenizer: Any, *, max_length: int = 10, progress: Any = None, **options: Any) -> TokenisedSet:
    return tokenise(
        str(path),
        DataOptions(train="", **options),
        tokenizer,
        max_length=max_length,
        progress=progress,
        cache_dir=path.parent / "cache",
    )


def texts(*lengths: int) -> list[dict[str, str]]:
    """Rows of text that make documents of so many tokens (one a character, and the end)."""
    return [{"text": "x" * (length - 1)} for length in lengths]


def test_documents(tmp_path: Path, tokenizer: Any) -> None:
    result = made(write(tmp_path, texts(3, 10)), tokenizer)
    x, end = tokenizer.convert_tokens_to_ids(["x", "</s>"])
    assert result.documents[0] == {"input_ids": [x, x, end], "labels": [-100, x, end]}
    assert {name: feature.feature.dtype for name, feature in result.documents.features.items()} == {
        "input_ids": "int32",
        "labels": "int32",
    }
    assert result.lengths.tolist() == [3, 10]
    assert result.account == Account(rows_read=2, rows_kept=2, documents=2, tokens=13, tokens_learned=11)


def closes(account: Account, tokens: int) -> bool:
    return (
        account.rows_read == account.rows_kept + account.rows_dropped + account.rows_bad
        and tokens == account.tokens + account.tokens_dropped + account.tokens_cut
    )


def test_overlong_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    """trl#5075, trl#4554: packing cuts nothing off that was not asked for."""
    path = write(tmp_path, texts(3, 5000, 11, 10, *[12] * 6))
    with pytest.raises(InputError) as raised:
        made(path, tokenizer)
    message = str(raised.value)
    assert "8 rows longer than max_length 10; row 2: 5,000 tokens; row 3: 11 tokens; row 5" in message
    assert "and 3 more" in message
    assert "raise data.max_length" in message
    assert "data.overlong: truncate, drop or split" in message
    assert not list((tmp_path / "cache").iterdir()), "nothing is left behind"


def test_overlong_truncate(tmp_path: Path, tokenizer: Any) -> None:
    """trl#5075, trl#4554: what is cut is counted and told."""
    result = made(write(tmp_path, texts(3, 25, 10)), tokenizer, overlong="truncate")
    assert result.lengths.tolist() == [3, 10, 10]
    assert (result.account.rows_cut, result.account.tokens_cut, result.account.rows_kept) == (1, 15, 3)
    assert closes(result.account, 38)
    assert "1 row cut to the maximum length: 15 tokens lost." in result.account.lines()


def test_overlong_drop(tmp_path: Path, tokenizer: Any) -> None:
    result = made(write(tmp_path, texts(3, 25, 10)), tokenizer, overlong="drop")
    assert result.lengths.tolist() == [3, 10]
    assert (result.account.rows_dropped, result.account.tokens_dropped) == (1, 25)
    assert closes(result.account, 38)


def test_overlong_split(tmp_path: Path, tokenizer: Any) -> None:
    result = made(write(tmp_path, [{"text": "abcdefghijklmnopqrst"}]), tokenizer, overlong="split")
    assert [tokenizer.decode(row["input_ids"]) for row in result.documents] == ["abcdefghij", "klmnopqrst"]
    assert all(row["labels"] == [-100, *row["input_ids"][1:]] for row in result.documents)
    account = result.account
    assert (account.rows_split, account.documents, account.tokens_dropped) == (1, 2, 1), "an end alone is not learned"
    assert closes(account, 21)


def test_split_pieces_with_nothing_to_learn_are_dropped(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "p" * 25, "completion": "c" * 10}]
    result = made(write(tmp_path, rows), tokenizer, overlong="split", chat_template="none")
    assert [tokenizer.decode(row["input_ids"]) for row in result.documents] == ["pppppccccc", "ccccc</s>"]
    assert result.account.tokens_dropped == 20
    assert result.account.tokens_learned == 5 + 5
    assert closes(result.account, 36)


def test_truncation_that_leaves_nothing_to_learn_is_a_bad_row(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, [{"prompt": "p", "completion": "c"}, {"prompt": "p" * 25, "completion": "c"}])
    options = {"overlong": "truncate", "chat_template": "none"}
    with pytest.raises(InputError, match=r"1 bad row; row 2: nothing to learn in its first 10 tokens; .*skip"):
        made(path, tokenizer, **options)
    account = made(path, tokenizer, bad_rows="skip", **options).account
    assert account.bad == ((2, "nothing to learn in its first 10 tokens"),)
    assert closes(account, 3 + 27)


BAD = [{"text": "fine"}, {"text": ""}, "{broken", {"body": "t"}, "[1]", '{"text": "\\ud800"}', {"text": "too"}]


def test_bad_rows_are_errors_by_number(tmp_path: Path, tokenizer: Any) -> None:
    """ms-swift's iterable packing: rows that fail to encode don't vanish."""
    path = write(tmp_path, BAD)
    with pytest.raises(InputError) as raised:
        made(path, tokenizer)
    message = str(raised.value)
    assert message.startswith(f"{path}: 5 bad rows; row 2: text is empty; row 3: line 3 is not JSON")
    assert "row 4: lacks text (format text; its fields are body)" in message
    assert "row 6: the tokenizer fails" in message
    assert "data.bad_rows: skip" in message


def test_a_remedy_is_told_once_for_all_rows(tmp_path: Path, tokenizer: Any) -> None:
    talks = [{"messages": [{"role": "bot", "content": "q"}]}] * 3
    path = write(tmp_path, talks)
    with pytest.raises(InputError) as raised:
        made(path, tokenizer)
    message = str(raised.value)
    assert message.startswith(f"{path}: 3 bad rows; row 1: message 1 of messages is by 'bot'; row 2: message 1 of")
    assert message.count("human/user/gpt/assistant/") == 1
    assert message.count("; mend them, use the roles human/") == 1
    assert message.endswith(", or set data.bad_rows: skip")


def test_one_sentence_says_how_to_mend_a_row(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, [{"text": "fine"}, {"body": "t"}])
    with pytest.raises(InputError) as raised:
        made(path, tokenizer)
    assert str(raised.value) == (
        f"{path}: 1 bad row; row 2: lacks text (format text; its fields are body); "
        "mend it, set data.fields or data.format, or set data.bad_rows: skip"
    )


def test_a_set_of_no_format_is_named(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, [{"body": "t"}])
    with pytest.raises(InputError, match=rf"^{path}: row 1 fits no format: its fields are body"):
        made(path, tokenizer)


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    result = made(write(tmp_path, BAD), tokenizer, bad_rows="skip")
    assert [tokenizer.decode(row["input_ids"]) for row in result.documents] == ["fine</s>", "too</s>"]
    assert [number for number, _ in result.account.bad] == [2, 3, 4, 5, 6]
    assert (result.account.rows_read, result.account.rows_bad, result.account.rows_kept) == (7, 5, 2)
    assert any(line.startswith("5 bad rows skipped, e.g. row 2: text is empty") for line in result.account.lines())


def test_twenty_bad_rows_are_named(tmp_path: Path, tokenizer: Any) -> None:
    result = made(write(tmp_path, [{"text": "fine"}, *[{"text": ""}] * 30]), tokenizer, bad_rows="skip")
    assert result.account.rows_bad == 30
    assert [number for number, _ in result.account.bad] == list(range(2, 22))


def test_bad_rows_of_a_folder_name_their_file(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder, texts(3), "a.jsonl")
    write(folder, [*texts(3), {"text": ""}], "b.jsonl")
    with pytest.raises(InputError, match=r"b\.jsonl row 2: text is empty"):
        made(folder, tokenizer)
    assert made(folder, tokenizer, bad_rows="skip").account.bad == ((2, "b.jsonl: text is empty"),)


def test_conversations_without_the_assistant_are_bad(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, [{"messages": [{"role": "user", "content": "q"}]}])
    with pytest.raises(InputError, match="row 1: nothing to learn: no turn of the assistant"):
        made(path, tokenizer)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"text": ""}, {"text": " "}],
            {"bad_rows": "skip"},
            r"nothing is left of 2 rows: 0 dropped.* 2 bad \(row 1: text",
        ),
        (texts(11, 12), {"overlong": "drop"}, "nothing is left of 2 rows: 2 dropped as longer than 10 tokens"),
        (["{", "["], {"bad_rows": "skip"}, "no row can be read; the first fault: line 1 is not JSON"),
        (texts(3), {"max_length": 1}, "max_length is 1; at least 2"),
    ],
)
def test_nothing_left(tmp_path: Path, tokenizer: Any, rows: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made(write(tmp_path, rows), tokenizer, **options)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="no end-of-text token"):
        made(write(tmp_path, texts(3)), tokenizer)


def test_progress_counts_rows(tmp_path: Path, tokenizer: Any) -> None:
    seen: list[tuple[int, int | None]] = []
    path = write(tmp_path, texts(*[3] * 1100))
    result = made(path, tokenizer, progress=lambda *told: seen.append(told))
    assert seen == [(512, None), (1024, None), (1100, None)]
    assert len(result.documents) == 1100


def test_the_second_call_doesnt_tokenise(tmp_path: Path, counting: Any) -> None:
    path = write(tmp_path, [*BAD, *texts(20)])
    first = made(path, counting, bad_rows="skip", overlong="truncate")
    calls = Counting.calls
    assert calls > 0
    again = made(path, counting, bad_rows="skip", overlong="truncate")
    assert Counting.calls == calls
    assert again.account == first.account
    assert again.documents[:] == first.documents[:]


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 99},
        {"overlong": "drop"},
        {"bad_rows": "skip"},
        {"learn": "all"},
        {"chat_template": "none"},
        {"fields": {"prompt": "completion", "completion": "prompt"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_matters_is_tokenised_anew(tmp_path: Path, counting: Any, change: dict[str, Any]) -> None:
    path = write(tmp_path, [{"prompt": "q", "completion": "a"}])
    made(path, counting, **{"max_length": 100})
    calls = Counting.calls
    made(path, counting, **{"max_length": 100, **change})
    assert Counting.calls > calls


def test_contents_and_tokenizer_matter_and_names_dont(tmp_path: Path, counting: Any) -> None:
    path = write(tmp_path, texts(3))
    made(path, counting)
    calls = Counting.calls
    made(path, counting, format="text")
    counting(["x"], padding=True, truncation=True, max_length=2)  # leaves its settings in the tokenizer
    made(write(tmp_path, texts(3), "other.jsonl"), counting)
    assert Counting.calls == calls + 1
    made(write(tmp_path, texts(4)), counting)
    assert Counting.calls == calls + 2
    counting.eos_token = "<|im_end|>"
    assert made(path, counting).documents[0]["input_ids"][-1] == counting.eos_token_id
    assert Counting.calls == calls + 3


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "no entry", "broken entry"])
def test_a_damaged_entry_is_made_anew(tmp_path: Path, counting: Any, damage: str) -> None:
    path = write(tmp_path, texts(3, 10))
    first = made(path, counting).documents[:]
    (entry,) = (tmp_path / "cache").iterdir()
    rows, calls = entry / "rows.arrow", Counting.calls
    content = rows.read_bytes()
    if damage == "cut":
        rows.write_bytes(content[:-100])
    elif damage == "changed":
        rows.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    elif damage == "gone":
        rows.unlink()
    elif damage == "no entry":
        (entry / "entry.json").unlink()
    else:
        (entry / "entry.json").write_text("{")
    assert made(path, counting).documents[:] == first
    assert Counting.calls > calls
    calls = Counting.calls
    made(path, counting)
    assert Counting.calls == calls, "and whole again"


def test_an_entry_that_another_process_finished_first_is_taken(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, texts(3))

    def finish_elsewhere(*_: Any) -> None:
        made(path, tokenizer)

    assert len(made(path, tokenizer, progress=finish_elsewhere).documents) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1, "no folder is left over"


def test_the_default_place(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "elsewhere")
    path = write(tmp_path, texts(3))
    result = tokenise(str(path), DataOptions(train=""), tokenizer, max_length=10)
    assert Path(result.documents.cache_files[0]["filename"]).is_relative_to(tmp_path / "elsewhere" / "slipstream")


def test_a_full_disk(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: ArrowCache, made: Path, key: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ArrowCache, "_publish", full)
    with pytest.raises(InputError, match=rf"{tmp_path / 'cache'}: no space left .*HF_DATASETS_CACHE"):
        made(write(tmp_path, texts(3)), tokenizer)
    assert not list((tmp_path / "cache").iterdir()), "nothing is left behind"


def test_the_account_is_json(tmp_path: Path, tokenizer: Any) -> None:
    account = made(write(tmp_path, BAD), tokenizer, bad_rows="skip").account
    assert Account.from_json(json.loads(json.dumps(dataclasses.asdict(account)))) == account


def test_the_learned_mask_survives_packing(tmp_path: Path, tokenizer: Any) -> None:
    """trl#3728: what the assistant says alone is learned, packed as well."""
    talks = [
        [{"role": "user", "content": f"q{i}" * i}, {"role": "assistant", "content": f"a{i}" * (i + 1)}]
        for i in range(40)
    ]
    result = made(write(tmp_path, [{"messages": talk} for talk in talks]), tokenizer, max_length=300)
    packed = pack_dataset(result.documents, 300, cache_dir=tmp_path / "cache")
    assert max(len(row["seq_lengths"]) for row in packed) > 1, "rows hold boundaries"
    learned = [[i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100] for row in packed]
    spoken = sorted("".join(tokenizer.decode(row) for row in learned).split("<|im_end|>"))
    assert spoken == sorted(["", *(talk[1]["content"] for talk in talks)])
    assert sum(map(len, learned)) == result.account.tokens_learned


class Taken:
    """A tokenizer's place in a count of rows: how many are read and not yet written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
        self.read = self.written = self.most = 0
        inner, chunks = in_order, tokens_module.in_chunks
        monkeypatch.setattr(tokens_module, "in_order", partial(inner, processes=processes, alone=1))
        monkeypatch.setattr(tokens_module, "in_chunks", lambda rows: chunks(self.counted(rows)))

    def counted(self, rows: Any) -> Iterator[Any]:
        for row in rows:
            self.read += 1
            self.most = max(self.most, self.read - self.written)
            yield row

    def progress(self, rows: int, _: int | None) -> None:
        self.written = rows


def test_processes_make_the_same_documents_with_few_rows_in_memory(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": "word " * (1 + i % 5)} for i in range(6000)]
    rows[4000] = {"text": ""}  # bad, and in a chunk of another process
    rows[5000] = {"text": "x" * 60}  # too long
    source = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=500)
    options = DataOptions(train="", bad_rows="skip", overlong="drop")
    plain = tokenise(str(source), options, tokenizer, max_length=40, cache_dir=tmp_path / "plain")
    taken = Taken(monkeypatch, processes=2)
    again: dict[str, Any] = {"cache_dir": tmp_path / "spread", "progress": taken.progress}
    spread = tokenise(str(source), options, tokenizer, max_length=40, **again)
    assert taken.read == len(rows)
    assert CHUNK_ROWS < taken.most <= (2 * AHEAD + 1) * CHUNK_ROWS < len(rows) / 2
    assert spread.account == plain.account
    assert plain.account.bad == ((4001, "text is empty"),)
    assert plain.account.rows_dropped == 1
    assert spread.documents[:] == plain.documents[:]


def test_faults_of_all_chunks_are_named_in_order(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": "" if i in (100, 700, 1300) else "word"} for i in range(1500)]
    with pytest.raises(InputError, match=r"3 bad rows; row 101: .*; row 701: .*; row 1301: "):
        made(write(tmp_path, rows), tokenizer)
