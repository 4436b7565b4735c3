"""Devices nobody has at hand are described; this machine's files are imitated in a folder."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.cost.hardware import (
    Device,
    available_memory,
    cgroup_limit,
    cgroup_room,
    compute_dtype,
    cpu_has_bf16,
    cpu_name,
    describe,
    free_host_memory,
    host_memory_limit,
    machine_memory,
)
from slipstream.errors import InputError

GIB = 1024**3
CARDS = {
    "RTX laptop": (8, 6, 6 * GIB, 0, "bfloat16"),
    "data-centre card": (9, 0, 141 * GIB, 0, "bfloat16"),
    "Grace Hopper": (9, 0, 96 * GIB, 0, "bfloat16"),
    "RTX 5090": (12, 0, 32 * GIB, 0, "bfloat16"),
    "DGX Spark": (12, 1, 119 * GIB, 1, "bfloat16"),
    "DGX Spark, not told by the driver": (12, 1, 119 * GIB, 0, "bfloat16"),
    "Jetson Orin, not told by the driver": (8, 7, 61 * GIB, 0, "bfloat16"),
    "Turing": (7, 5, 16 * GIB, 0, "float32"),
}
UNIFIED = {name for name in CARDS if "Spark" in name or "Jetson" in name}


@pytest.mark.parametrize("name", CARDS)
def test_cards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor, memory, integrated, dtype = CARDS[name]
    properties = SimpleNamespace(name=name, major=major, minor=minor, total_memory=memory, is_integrated=integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = describe("cuda:0")
    assert device == Device("cuda", name, memory, (major, minor), dtype == "bfloat16", name in UNIFIED)
    assert compute_dtype(device) == dtype


@pytest.mark.parametrize(("bf16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_cpu_computes_in_bf16_only_with_units_for_it(bf16: bool, dtype: str) -> None:
    assert compute_dtype(Device("cpu", "a processor", 16 * GIB, None, bf16, unified_memory=True)) == dtype


def test_describes_this_cpu() -> None:
    device = describe("cpu")
    assert (device.kind, device.compute_capability) == ("cpu", None)
    assert device.name
    assert device.memory_bytes == machine_memory() > GIB // 4


def test_other_kinds_are_refused() -> None:
    with pytest.raises(InputError, match=r"device meta: .*use one of these"):
        describe("meta")


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx512f avx512_bf16\n\nprocessor\t: 1\n", True),
        ("processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu amx_bf16\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", True),
        ("processor\t: 0\nmodel name\t: EPYC\nflags\t\t: fpu avx2 not_avx512_bf16\n", False),
        ("", False),
    ],
)
def test_bf16_units(tmp_path: Path, cpuinfo: str, expected: bool) -> None:
    write(tmp_path, "proc/cpuinfo", cpuinfo)
    assert cpu_has_bf16(tmp_path) is expected


def test_cpu_name(tmp_path: Path) -> None:
    assert cpu_name(tmp_path)  # no such file: the architecture
    write(tmp_path, "proc/cpuinfo", "model name\t: Some: Processor\n")
    assert cpu_name(tmp_path) == "Some: Processor"


def test_version_2_limit_of_any_group_above_binds(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pod/container\n")
    write(tmp_path, "sys/fs/cgroup/pod/container/memory.max", "max\n")
    assert cgroup_limit(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/pod/memory.max", "1000000\n")
    assert cgroup_limit(tmp_path) == 1_000_000
    write(tmp_path, "sys/fs/cgroup/pod/container/memory.max", "900000\n")
    assert cgroup_limit(tmp_path) == 900_000


def test_version_1_limit_inside_a_container(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    limit = tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes"  # the container sees its own group as the root
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert cgroup_limit(tmp_path) is None
    limit.write_text("2000000\n")
    assert cgroup_limit(tmp_path) == 2_000_000


def test_room_in_the_container_is_its_limit_less_what_it_uses(tmp_path: Path) -> None:
    assert cgroup_room(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", "0::/pod/container\n")
    write(tmp_path, "sys/fs/cgroup/pod/memory.max", "1000000\n")
    write(tmp_path, "sys/fs/cgroup/pod/memory.current", "300000\n")
    assert cgroup_room(tmp_path) == 700_000
    write(tmp_path, "sys/fs/cgroup/pod/memory.stat", "anon 100000\ninactive_file 150000\nfile 200000\n")
    assert cgroup_room(tmp_path) == 850_000  # page cache that nobody needs is as good as free
    write(tmp_path, "sys/fs/cgroup/pod/container/memory.max", "400000\n")
    write(tmp_path, "sys/fs/cgroup/pod/container/memory.current", "500000\n")
    assert cgroup_room(tmp_path) == 0
    write(tmp_path, "sys/fs/cgroup/pod/container/memory.max", "max\n")
    write(tmp_path, "proc/meminfo", "MemAvailable:    500 kB\n")
    assert free_host_memory(tmp_path) == 500 * 1024
    write(tmp_path, "proc/meminfo", "MemAvailable:    5000 kB\n")
    assert free_host_memory(tmp_path) == 850_000


def test_room_in_a_version_1_container(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:memory:/docker/abc\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "600000\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.stat", "cache 1\ntotal_inactive_file 50000\n")
    assert cgroup_room(tmp_path) == 450_000


def test_host_memory_is_the_smaller_of_the_two(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    3000 kB\n")
    assert host_memory_limit(tmp_path) == available_memory(tmp_path) == 3000 * 1024
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "1000000\n")
    assert host_memory_limit(tmp_path) == 1_000_000
    write(tmp_path, "sys/fs/cgroup/memory.max", "5000000\n")
    assert host_memory_limit(tmp_path) == 3000 * 1024


def test_without_the_files_all_memory_counts(tmp_path: Path) -> None:
    assert host_memory_limit(tmp_path) == machine_memory()


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
