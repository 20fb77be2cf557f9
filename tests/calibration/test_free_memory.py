"""Free memory of a machine and of a container's control group, from made-up files of /proc and /sys."""

from __future__ import annotations

import pytest
import torch

from kvq_cli.calibration.free_memory import free_bytes

CPU = torch.device("cpu")
MEMINFO = "MemTotal:       9000000 kB\nMemFree:         100000 kB\nMemAvailable:   4000000 kB\n"


@pytest.fixture
def write(tmp_path):
    def files(**contents):
        for name, text in {"proc/meminfo": MEMINFO, **contents}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return files


def group(limit, used, stat, version):
    names = ("memory.max", "memory.current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    folder = "sys/fs/cgroup/" if version == 2 else "sys/fs/cgroup/memory/memory."
    [limit_file, used_file] = (f"{folder}{name}" for name in names)
    return {limit_file: limit, used_file: used, limit_file.rpartition("/")[0] + "/memory.stat": stat}


def test_files_that_the_system_drops_are_free(write):
    assert free_bytes(CPU, write()) == 4_000_000 << 10


@pytest.mark.parametrize(("version", "entry"), [(2, "inactive_file"), (1, "total_inactive_file")])
def test_limit_of_a_container(write, version, entry):
    stat = f"anon 7\n{entry} 1000\nactive_{entry} 5\n"
    assert free_bytes(CPU, write(**group("3000000\n", "1000000\n", stat, version))) == 2_001_000
    assert free_bytes(CPU, write(**group("3000000\n", "4000000\n", stat, version))) == 0
    assert free_bytes(CPU, write(**group("9223372036854771712\n", "1000000\n", stat, version))) == 4_000_000 << 10


def test_group_without_a_limit(write):
    assert free_bytes(CPU, write(**group("max\n", "1000000\n", "inactive_file 5\n", 2))) == 4_000_000 << 10


def test_systems_that_do_not_say(tmp_path):
    assert free_bytes(CPU, tmp_path) == 8 << 30
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemFree: 5 kB\n")
    assert free_bytes(CPU, tmp_path) == 8 << 30
