"""Small PTX kernels assembled from their bodies, run on the emulator over numpy arrays."""

import re
import struct
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.emulator import EAGER, Gpu, Schedule
from tests.emulator.machine.launch import Launch

_REGISTERS = {
    "p": "pred",
    "h": "b16",
    "r": "b32",
    "f": "f32",
    "rd": "b64",
    "fd": "f64",
    "q": "b128",
}


def assemble(body: str, parameters: int, shared: int = 0, target: str = "sm_100a") -> str:
    """PTX module with one kernel ``k``.

    ``%rd90``, ``%rd91`` .. hold the pointer parameters, ``%r90`` the thread index along x. The
    name of a register gives its type: %p pred, %h b16, %r b32, %f f32, %rd b64, %fd f64, %q b128.

    Args:
        body: instructions.
        parameters: number of 64-bit parameters.
        shared: bytes of the static shared array ``smem``.
        target: target of the module.
    """
    declared = "".join(
        f"    .reg .{kind} {name};\n"
        for name, kind in sorted(_named(body + "%r90 " + "".join(f"%rd9{n} " for n in range(9))))
    )
    loads = "".join(f"    ld.param.u64 %rd9{n}, [p{n}];\n" for n in range(parameters))
    params = ", ".join(f".param .u64 p{n}" for n in range(parameters))
    memory = f"    .shared .align 1024 .b8 smem[{shared}];\n" if shared else ""
    return (
        f".version 8.8\n.target {target}\n.address_size 64\n"
        f".visible .entry k({params})\n{{\n{declared}{memory}{loads}"
        f"    mov.u32 %r90, %tid.x;\n{body}\n    ret;\n}}\n"
    )


def _named(text: str) -> set[tuple[str, str]]:
    found = set()
    for match in re.finditer(r"%(rd|fd|p|h|r|f|q)(\d+)\b", text):
        found.add((match.group(0), _REGISTERS[match.group(1)]))
    return found


def global_array(values: Any, dtype: Any = None) -> np.ndarray:
    """Copy of ``values`` aligned to 1024 bytes, as device allocations are."""
    source = np.ascontiguousarray(values, dtype)
    raw = np.zeros(source.nbytes + 2048, np.uint8)
    skip = -raw.ctypes.data % 1024
    placed = raw[skip : skip + source.nbytes].view(source.dtype).reshape(source.shape)
    placed[...] = source
    return placed


@dataclass
class Run:
    """A launch of an assembled kernel.

    Attributes:
        grid, block, cluster: number of CTAs, threads, and CTAs of a cluster, along x.
        dynamic_shared: bytes of dynamic shared memory.
        schedule: schedule of the emulator.
        launches: number of launches, with programmatic stream serialization.
        resident: whether CTAs share SMs and launches overlap.
        options: keyword arguments of :class:`Gpu`.
        target: target of the module.
    """

    grid: int = 1
    block: int = 32
    cluster: int = 1
    dynamic_shared: int = 0
    schedule: Schedule = EAGER
    launches: int = 1
    resident: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    target: str = "sm_100a"

    def __call__(self, body: str, *arrays: np.ndarray, shared: int = 0) -> Launch:
        gpu = Gpu(**self.options)
        for number, array in enumerate(arrays):
            raw = array.reshape(-1).view(np.uint8)
            gpu.memory.register_array(raw, name=f"array {number}")
        module = gpu.load(assemble(body, len(arrays), shared, self.target))
        with gpu.overlapped() if self.resident else nullcontext():
            for _ in range(self.launches):
                launch = gpu.launch(
                    module,
                    "k",
                    (self.grid, 1, 1),
                    (self.block, 1, 1),
                    (self.cluster, 1, 1),
                    self.dynamic_shared,
                    [struct.pack("<Q", a.ctypes.data) for a in arrays],
                    {"programmatic_stream_serialization": 1},
                    self.schedule,
                )
        return launch


run = Run()
