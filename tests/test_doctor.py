"""The doctor's findings for described machines, and its report on this one."""

import io
import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from slipstream import doctor
from slipstream.cost.ceilings import Ceilings, named_device
from slipstream.cost.hardware import Device
from slipstream.device import ceilings, driver

CPU = Device("cpu", "a processor", 2**34, None, bf16=False, unified_memory=True)
HOPPER = Device("cuda", "a Hopper", 2**37, (9, 0), bf16=True, unified_memory=False)
TURING = Device("cuda", "a Turing", 2**34, (7, 5), bf16=False, unified_memory=False)
RATES = Ceilings("float32", 2e11, 2e10, None, None, None, 5e-6, 0.0, "measured")


def found(*cards: Device, no_cuda: str = "") -> dict[str, doctor.Capability]:
    return {item.name: item for item in doctor.capabilities(list(cards), CPU, no_cuda)}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ceilings of a made-up device: measuring is tested by itself."""
    monkeypatch.setattr(ceilings, "measure", lambda device: RATES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


def test_a_card_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("slipstream.model.quantize.find_spec", lambda name: name)
    monkeypatch.setattr("slipstream.train.options.find_spec", lambda name: name)
    capabilities = found(HOPPER)
    missing = {name for name, item in capabilities.items() if not item.available}
    assert missing <= {"attention xformers"}  # whose kernels no test machine has
    assert "load.dtype auto takes bfloat16" in capabilities


ALWAYS = {
    "packing",
    "attention sdpa",
    "activations keep",
    "activations recompute",
    "tiled mlp",
    "experts loop",
    "step compiled",
    "step eager",
}
CARD = {"training on CUDA", "activations offload", "norms", "step captured"}
AMPERE = {"bf16 compute", "attention varlen", "attention flex"}
CLASSES = {
    "rtx-4060-laptop": CARD | AMPERE,
    "rtx-2070-laptop": CARD,
    "h200": CARD | AMPERE | {"experts grouped"},
    "dgx-spark": CARD | AMPERE,
}


@pytest.mark.parametrize("name", CLASSES)
def test_device_classes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"bitsandbytes", "xformers"}
    for where in ("importlib.util", "slipstream.model.quantize", "slipstream.model.attention.xformers"):
        monkeypatch.setattr(f"{where}.find_spec", lambda name: None if name in missing else name)
    monkeypatch.setattr("slipstream.train.options.find_spec", lambda name: None)
    device, _ = named_device(name)
    capabilities = found(device)
    dtype = "bfloat16" if device.bf16 else "float32"
    available = {item for item in capabilities if capabilities[item].available}
    assert available == ALWAYS | CLASSES[name] | {f"load.dtype auto takes {dtype}"}
    for item, extra in (("NF4 weights", "nf4"), ("8-bit optimizer", "nf4"), ("attention xformers", "xformers")):
        assert f"pip install 'slipstream[{extra}]'" in capabilities[item].reason
    assert all(item.reason for item in capabilities.values())


def test_a_cpu_has_what_needs_no_card() -> None:
    capabilities = found(no_cuda="no driver")
    available = {name for name, item in capabilities.items() if item.available}
    eight_bits = {"8-bit optimizer"} if find_spec("bitsandbytes") else set()
    assert available == {*ALWAYS, "experts grouped", "load.dtype auto takes float32", *eight_bits}
    assert "auto takes loop: nothing waits" in capabilities["experts grouped"].reason
    assert "auto takes eager" in capabilities["step compiled"].reason
    assert not any("the model is on" in item.reason for item in capabilities.values())  # there is none


def test_a_card_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    capabilities = found(HOPPER)
    for name in ("step compiled", "step captured"):
        assert capabilities[name] == doctor.Capability(name, False, "Triton is not installed; auto takes eager")


def test_memory_shared_with_the_host_is_offloaded_only_where_asked_for() -> None:
    spark, _ = named_device("dgx-spark")
    reason = found(spark)["activations offload"].reason
    assert reason.startswith("where asked for; auto never does: NVIDIA GB10 shares one memory")


def test_an_old_card_says_what_is_missing() -> None:
    capabilities = found(TURING)
    assert capabilities["training on CUDA"].available
    assert not capabilities["attention varlen"].available
    assert "7.5" in capabilities["attention varlen"].reason
    assert "8.0" in capabilities["attention varlen"].reason
    assert not capabilities["bf16 compute"].available
    assert "load.dtype auto takes float32" in capabilities


def test_without_a_card_the_cpu_is_looked_at() -> None:
    capabilities = found(no_cuda="no driver")
    assert capabilities["training on CUDA"] == doctor.Capability("training on CUDA", False, "no driver")
    assert not capabilities["attention varlen"].available
    assert capabilities["attention sdpa"].available


@pytest.mark.parametrize(
    ("built_for", "driver", "visible", "remedy"),
    [
        (None, None, None, "training runs on the CPU"),
        (None, "580.1", None, "install a CUDA build"),
        ("13.0", "580.1", "", "unset it"),
        ("13.0", "470.1", None, "update the driver"),
    ],
)
def test_why_there_is_no_card(
    built_for: str | None, driver: str | None, visible: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert remedy in doctor.no_cuda_reason(built_for, driver)


def test_driver_version_is_the_first_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 580.12\necho 580.12\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert driver.driver_version() == "580.12"
    command.write_text("#!/bin/sh\necho no driver; exit 9\n")
    assert driver.driver_version() is None


def test_a_hanging_driver_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: object, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(driver.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(driver.subprocess, "run", hang)
    assert driver.driver_version() is None


def test_report_on_this_machine_is_plain_json() -> None:
    report = doctor.report()
    assert json.loads(json.dumps(report))["devices"][-1]["kind"] == "cpu"
    assert report["versions"]["torch"]
    assert report["cpu"]["cores"] >= 1
    assert 0 < report["host_memory"]["usable_bytes"] <= report["host_memory"]["machine_bytes"]


def test_tables_show_every_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    report = doctor.report()
    report["versions"]["trl"] = None
    text = io.StringIO()
    doctor.show(report, Console(file=text, width=200, markup=False))
    lines = text.getvalue().splitlines()
    assert any("trl" in line and "absent" in line for line in lines)
    assert any("matrix product, float32" in line and "0.2 TFLOP/s" in line for line in lines)
    assert any("pinned host" in line and "one memory" in line for line in lines)
    assert all(any(item["reason"] in line for line in lines) for item in report["capabilities"])


def test_a_card_is_shown_with_its_capability() -> None:
    card = {**vars(HOPPER), "compute_capability": [9, 0]}
    assert "compute capability 9.0, memory of its own, bf16" in doctor._device_line(card)
