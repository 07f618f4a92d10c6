"""Memory available to a process, on machines described by a tree of files."""

from pathlib import Path

import pytest

from vllm_fp4_plugin.engine import host_memory
from vllm_fp4_plugin.engine.host_memory import GIB, HostMemory

MACHINE = {"proc/meminfo": "MemTotal: 25165824 kB\nMemFree: 1 kB\nMemAvailable: 20971520 kB\n"}
NODE = "sys/devices/system/node/node{}/meminfo"
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
STAT_V2 = f"anon 7\nactive_file {GIB}\ninactive_file {GIB // 2}\nslab_reclaimable {GIB // 2}\n"
STAT_V1 = f"cache 7\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}\nactive_file 1\n"


def node(total: int, free: int) -> str:
    kept = "Node 1 Active(file): 1048576 kB\nNode 1 Inactive(file): 1048576 kB\n"
    sizes = {"MemTotal": total, "MemFree": free, "SReclaimable": 1}
    return kept + "".join(f"Node 1 {name}: {gib << 20} kB\n" for name, gib in sizes.items())


def v1(path: str, limit: int, used: int) -> dict[str, str]:
    group = f"{V1}/{path}".rstrip("/")
    return {
        f"{group}/memory.limit_in_bytes": f"{limit}\n",
        f"{group}/memory.usage_in_bytes": f"{used}\n",
        f"{group}/memory.stat": STAT_V1,
    }


def v2(path: str, used: int, **limits: int | str) -> dict[str, str]:
    group = f"{V2}/{path}".rstrip("/")
    files = {f"{group}/memory.{name}": f"{limit}\n" for name, limit in limits.items()}
    return files | {f"{group}/memory.current": f"{used}\n", f"{group}/memory.stat": STAT_V2}


V1_GROUP = {"proc/self/cgroup": "9:name=systemd:/\n4:memory,cpu:/docker/a\n0::/\n"}
V2_GROUP = {"proc/self/cgroup": "0::/user.slice/server.scope\n"}
UNLIMITED = 9223372036854771712

CASES = {
    "a machine by itself": ({}, (24, 20)),
    # A node's file lacks memory that was plugged in later.
    "one memory node": ({NODE.format(1): node(9, 1)}, (24, 20)),
    "two memory nodes": ({NODE.format(0): node(12, 2), NODE.format(1): node(12, 5)}, (12, 8)),
    "another node": ({NODE.format(0): node(12, 2), NODE.format(2): node(12, 5)}, (24, 20)),
    "version 1, no limit": (V1_GROUP | v1("docker/a", UNLIMITED, 9 * GIB), (24, 20)),
    "version 1": (V1_GROUP | v1("docker/a", 8 * GIB, 5 * GIB), (8, 5)),
    "version 1, seen from within": (V1_GROUP | v1("", 8 * GIB, 5 * GIB), (8, 5)),
    "version 1, a group around it": (
        V1_GROUP | v1("docker/a", UNLIMITED, GIB) | v1("docker", 8 * GIB, 7 * GIB),
        (8, 3),
    ),
    "version 2, no limit": (V2_GROUP | v2("user.slice/server.scope", 4 * GIB, max="max"), (24, 20)),
    "version 2": (V2_GROUP | v2("user.slice/server.scope", 4 * GIB, max=6 * GIB), (6, 4)),
    "version 2, slowed before it is stopped": (
        V2_GROUP | v2("user.slice/server.scope", 4 * GIB, max=6 * GIB, high=5 * GIB),
        (5, 3),
    ),
    "version 2, seen from within": (
        {"proc/self/cgroup": "0::/\n"} | v2("", 3 * GIB, max=6 * GIB),
        (6, 5),
    ),
    "version 2, outside of what is seen": (
        {"proc/self/cgroup": "0::/../../b\n"} | v2("", 3 * GIB, max=6 * GIB),
        (6, 5),
    ),
    "version 2, a slice around it": (
        V2_GROUP
        | v2("user.slice/server.scope", 3 * GIB, max=16 * GIB)
        | v2("user.slice", 7 * GIB, max=8 * GIB),
        (8, 3),
    ),
    "version 2 is full": (
        V2_GROUP | v2("user.slice/server.scope", 9 * GIB, max=6 * GIB),
        (6, 0),
    ),
    "version 2, copies of files alone": (
        V2_GROUP | v2("user.slice/server.scope", GIB, max=6 * GIB),
        (6, 6),
    ),
    "a limit above the machine's": (
        V2_GROUP | v2("user.slice/server.scope", 3 * GIB, max=64 * GIB),
        (24, 20),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_left(case: str, tmp_path: Path) -> None:
    files, expected = CASES[case]
    for name, text in (MACHINE | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    total, available = expected
    assert host_memory.read(1, tmp_path) == HostMemory(total * GIB, available * GIB)


def test_this_machine() -> None:
    memory = host_memory.read(0)
    assert 0 < memory.available < memory.total
