"""Memory available to a process: the minimum over machine, NUMA node and cgroups."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

GIB = 1 << 30


@dataclass(frozen=True)
class HostMemory:
    """Memory that a process may use.

    Attributes:
        total: bytes in all, used or free.
        available: bytes that are free, or that the operating system can reclaim, e.g. page cache.
    """

    total: int
    available: int


def read(node: int, root: Path = Path("/")) -> HostMemory:
    """Read the memory available to a process: the minimum over machine, NUMA node and cgroups.

    Args:
        node: NUMA node that the process is bound to; ignored on a machine with a single node.
        root: directory that holds ``proc`` and ``sys``.
    """
    found = [_machine(root), *_node(node, root), *_control_groups(root)]
    return HostMemory(min(each.total for each in found), min(each.available for each in found))


def _machine(root: Path) -> HostMemory:
    sizes = _sizes(root / "proc/meminfo")
    return HostMemory(sizes["MemTotal"], sizes["MemAvailable"])


def _node(node: int, root: Path) -> Iterator[HostMemory]:
    """Yield a NUMA node's memory if the machine has several nodes.

    A machine's only node is left out, as its file may lack hot-plugged memory.
    """
    nodes = root / "sys/devices/system/node"
    file = nodes / f"node{node}/meminfo"
    if len(list(nodes.glob("node[0-9]*/meminfo"))) > 1 and file.is_file():
        sizes = _sizes(file)
        kept = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
        yield HostMemory(sizes["MemTotal"], sum(sizes.get(name, 0) for name in kept))


def _sizes(file: Path) -> dict[str, int]:
    """Bytes by name, from lines such as ``Node 0 MemFree: 12 kB``."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, size = line.rpartition(":")
        if size.endswith(" kB"):
            found[name.split()[-1]] = int(size.removesuffix(" kB")) * 1024
    return found


# --- control groups -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Hierarchy:
    """Files of one version of cgroups.

    Attributes:
        mounts: possible root directories; the first that exists is used.
        limits: files with a group's limits.
        usage: file with a group's usage, page cache included.
        given_up: entries of ``memory.stat`` that count memory the operating system can reclaim.
    """

    mounts: tuple[str, ...]
    limits: tuple[str, ...]
    usage: str
    given_up: tuple[str, ...]


_V1 = _Hierarchy(
    ("sys/fs/cgroup/memory",),
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _Hierarchy(
    ("sys/fs/cgroup/unified", "sys/fs/cgroup"),
    ("memory.max", "memory.high"),
    "memory.current",
    ("active_file", "inactive_file", "slab_reclaimable"),
)


def _control_groups(root: Path) -> Iterator[HostMemory]:
    """Yield the memory left by the limits of each of this process's cgroups and their parents."""
    file = root / "proc/self/cgroup"
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy = _V1 if controllers else _V2
        mount = next(filter(Path.is_dir, (root / m for m in hierarchy.mounts)), None)
        for group in () if mount is None else _groups(mount, path):
            yield from _left_by(group, hierarchy)


def _groups(mount: Path, path: str) -> Iterator[Path]:
    """Yield the directories of a cgroup and its parents, then the mount.

    In a container the mount may itself be the cgroup.
    """
    inner = PurePosixPath(path.lstrip("/"))
    if ".." not in inner.parts:
        yield from (mount / each for each in (inner, *inner.parents) if each.parts)
    yield mount


def _left_by(group: Path, hierarchy: _Hierarchy) -> Iterator[HostMemory]:
    limits = [limit for name in hierarchy.limits if (limit := _number(group / name)) is not None]
    used = _number(group / hierarchy.usage)
    if not limits or used is None:
        return
    kept = _statistics(group / "memory.stat")
    used -= sum(kept.get(name, 0) for name in hierarchy.given_up)
    yield HostMemory(min(limits), max(0, min(limits) - max(0, used)))


def _number(file: Path) -> int | None:
    """Number in a file; None if the file is missing or sets no limit."""
    text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None


def _statistics(file: Path) -> dict[str, int]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else ()
    return {name: int(value) for name, value in (line.split() for line in lines)}
