"""Which checkpoint a run goes on from: the newest whole one, by number and not by name; and what makes one whole."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream import InputError
from slipstream.train.checkpoint import (
    MANIFEST,
    NEEDED,
    WEIGHTS,
    checkpoint_step,
    damage,
    is_whole,
    last_checkpoint,
    rotate,
    write_manifest,
)

WHOLE = (*NEEDED, WEIGHTS[0])


def save(folder: Path, name: str, files: tuple[str, ...] = WHOLE) -> Path:
    (folder / name).mkdir(parents=True)
    for file in files:
        place = folder / name / file
        if place.suffix == ".json":
            place.write_text(json.dumps({"global_step": 1, "weight_map": {}}))
        elif place.suffix == ".safetensors":
            save_file({"a": torch.arange(64)}, place)
        else:
            torch.save({"a": torch.arange(64)}, place)
    return folder / name


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def turn(path: Path, value: int) -> None:
    """Another value where 37 is among those saved."""
    data = path.read_bytes()
    saved = (37).to_bytes(8, "little")
    assert data.count(saved) == 1
    path.write_bytes(data.replace(saved, value.to_bytes(8, "little")))


@pytest.mark.parametrize(
    ("file", "harm", "told"),
    [
        ("optimizer.pt", cut, "optimizer.pt cannot be read: BadZipFile"),
        ("optimizer.pt", lambda path: path.write_bytes(b""), "optimizer.pt cannot be read: BadZipFile"),
        ("scheduler.pt", lambda path: path.write_bytes(bytes(999)), "scheduler.pt cannot be read: BadZipFile"),
        ("rng_state.pth", lambda path: turn(path, 38), "rng_state.pth holds other bytes than were saved"),
        ("trainer_state.json", cut, "trainer_state.json cannot be read: JSONDecodeError"),
        ("trainer_state.json", lambda path: path.write_bytes(b"\xff"), "trainer_state.json cannot be read: UnicodeDe"),
        ("trainer_state.json", lambda path: path.write_text("{}"), "trainer_state.json holds no global_step"),
        ("trainer_state.json", lambda path: path.write_text("[]"), "trainer_state.json holds no global_step"),
        (WEIGHTS[0], cut, f"{WEIGHTS[0]} cannot be read: SafetensorError"),
        (WEIGHTS[0], lambda path: path.write_text(""), f"{WEIGHTS[0]} cannot be read: SafetensorError"),
        ("rng_state_1.pth", cut, "rng_state_1.pth cannot be read: BadZipFile"),
        (WEIGHTS[2], lambda path: path.write_text('{"weight_map": {"a": "no.safetensors"}}'), "no.safetensors is miss"),
    ],
)  # fmt: skip
def test_damage_without_a_list_of_files_is_named_too(
    tmp_path: Path, file: str, harm: Callable[[Path], object], told: str
) -> None:
    names = tuple(dict.fromkeys((*WHOLE, file)))
    whole, harmed = save(tmp_path, "checkpoint-6", names), save(tmp_path, "checkpoint-9", names)
    assert is_whole(harmed)
    harm(harmed / file)
    sentences: list[str] = []
    assert last_checkpoint(tmp_path, sentences.append) == whole
    assert len(sentences) == 1
    assert sentences[0].startswith(f"checkpoint-9 is damaged ({told}")


def test_the_newest_by_number(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        save(tmp_path, f"checkpoint-{step}")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-100"


@pytest.mark.parametrize("weights", WEIGHTS)
def test_any_kind_of_weights(tmp_path: Path, weights: str) -> None:
    assert is_whole(save(tmp_path, "checkpoint-5", (*NEEDED, weights)))


@pytest.mark.parametrize("missing", WHOLE)
def test_one_that_was_cut_off_is_passed_over(tmp_path: Path, missing: str) -> None:
    whole = save(tmp_path, "checkpoint-5")
    cut = save(tmp_path, "checkpoint-10", tuple(name for name in WHOLE if name != missing))
    assert is_whole(whole)
    assert not is_whole(cut)
    assert last_checkpoint(tmp_path) == whole


def test_other_things_in_the_folder_are_passed_over(tmp_path: Path) -> None:
    whole = save(tmp_path, "checkpoint-5")
    save(tmp_path, "checkpoint-best")
    save(tmp_path, "tmp-checkpoint-9")
    (tmp_path / "checkpoint-7").write_text("a file")
    assert last_checkpoint(tmp_path) == whole


@pytest.mark.parametrize("there", [True, False])
def test_without_one_the_remedy_is_named(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "checkpoints"
    if there:
        save(folder, "checkpoint-3", NEEDED[:1])
    with pytest.raises(InputError, match=r"checkpoints' holds no whole checkpoint.*another output.*train.save_every"):
        last_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "step"),
    [("checkpoint-12", 12), ("checkpoint-", -1), ("x", -1), ("checkpoint-²", -1)],
)
def test_steps_of_names(name: str, step: int) -> None:
    assert checkpoint_step(Path(name)) == step


# ------------------------------------------------------------------------------------------------------- the manifest


def listed(folder: Path, name: str, files: tuple[str, ...] = WHOLE) -> Path:
    made = save(folder, name, files)
    (made / "inner").mkdir()
    (made / "inner/shard.bin").write_bytes(b"abc")
    write_manifest(made)
    return made


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def edit(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps({**manifest, **changes}))

    return change


def test_a_manifest_lists_every_file(tmp_path: Path) -> None:
    folder = listed(tmp_path, "checkpoint-7")
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["step"] == 7
    assert sorted(manifest["files"]) == sorted([*WHOLE, "inner/shard.bin"])
    assert manifest["files"]["inner/shard.bin"] == {
        "bytes": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    assert damage(folder) is None


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda folder: flip(folder / "optimizer.pt"), "optimizer.pt holds other bytes than were saved"),
        (lambda folder: flip(folder / "inner/shard.bin"), "shard.bin holds other bytes than were saved"),
        (lambda folder: (folder / "optimizer.pt").write_text("." * 1200), "optimizer.pt has 1,200 bytes and should"),
        (lambda folder: (folder / "rng_state.pth").write_text(""), "rng_state.pth has 0 bytes and should have"),
        (lambda folder: (folder / "scheduler.pt").unlink(), "scheduler.pt is missing"),
        (lambda folder: (folder / MANIFEST).write_text('{"format": 1, '), "slipstream.json cannot be read: JSONDec"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "slipstream.json cannot be read: TypeError"),
        (lambda folder: (folder / MANIFEST).write_text("{}"), "slipstream.json cannot be read: KeyError: 'format'"),
        (edit(files=None), "slipstream.json cannot be read: TypeError"),
        (edit(files={"optimizer.pt": 3}), "slipstream.json cannot be read: TypeError"),
        (edit(files={}), "slipstream.json does not list trainer_state.json"),
        (edit(format=2), "slipstream.json has format 2, and this version reads 1"),
        (edit(step=5), "slipstream.json is of step 5"),
    ],
)  # fmt: skip
def test_damage_is_named_and_the_one_before_it_taken(tmp_path: Path, harm: Callable[[Path], None], told: str) -> None:
    whole, harmed = listed(tmp_path, "checkpoint-6"), listed(tmp_path, "checkpoint-9")
    harm(harmed)
    sentences: list[str] = []
    assert last_checkpoint(tmp_path, sentences.append) == whole
    assert len(sentences) == 1
    assert sentences[0].startswith(f"checkpoint-9 is damaged ({told}")
    assert sentences[0].endswith("; passed over")
    assert not is_whole(harmed)
    shutil.rmtree(whole)
    with pytest.raises(InputError) as caught:
        last_checkpoint(tmp_path)
    assert f"no whole checkpoint to resume from: checkpoint-9 is damaged ({told}" in str(caught.value)


def test_a_disk_that_cannot_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harmed = listed(tmp_path, "checkpoint-9")
    inner = Path.open

    def broken(path: Path, *arguments: object, **named: object) -> object:
        if path.name == "optimizer.pt":
            raise OSError(errno.EIO, "Input/output error")
        return inner(path, *arguments, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", broken)
    assert damage(harmed) == "optimizer.pt cannot be read: Input/output error"


def test_files_of_other_ranks_need_no_list_of_names(tmp_path: Path) -> None:
    names = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", WEIGHTS[0])
    assert is_whole(listed(tmp_path, "checkpoint-3", names))
    assert not is_whole(save(tmp_path, "checkpoint-4", names))  # without its manifest nobody knows


# ----------------------------------------------------------------------------------------------------------- rotation


@pytest.mark.parametrize(
    ("steps", "saved", "keep", "best", "left"),
    [
        ((3, 6, 9), 9, 2, None, {6, 9}),
        ((3, 6, 9), 9, 1, None, {9}),
        ((3, 6, 9), 9, 5, None, {3, 6, 9}),
        ((3, 6, 9), 9, None, None, {3, 6, 9}),
        ((3, 6, 9), 9, 2, 3, {3, 9}),
        ((3, 6, 9), 9, 1, 3, {3, 9}),
        ((3, 6, 9, 12), 6, 1, None, {6}),  # what comes later was damaged when the run went on from 3
        ((3, 6, 9, 12), 6, 2, None, {3, 6}),
        ((9, 10, 100), 100, 2, None, {10, 100}),
    ],
)
def test_rotation(
    tmp_path: Path, steps: tuple[int, ...], saved: int, keep: int | None, best: int | None, left: set[int]
) -> None:
    for step in reversed(steps):
        save(tmp_path, f"checkpoint-{step}")
    save(tmp_path, "checkpoint-mine")
    rotate(tmp_path / f"checkpoint-{saved}", keep=keep, best=best and tmp_path / f"checkpoint-{best}")  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{step}" for step in left} | {"checkpoint-mine"}
