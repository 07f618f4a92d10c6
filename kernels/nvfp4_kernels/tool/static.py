"""Static properties of a kernel, known without running it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvfp4_kernels.runtime.compile import DeviceKernel, compile_kernel
from nvfp4_kernels.tool.binary import FAT_MAGIC, Cubin, UnreadableBinary, read_fat_binary
from nvfp4_kernels.tool.instructions import LOCAL, count, disassemble

# The launch's dynamic shared memory: third field of a cudaLaunchConfig_t in the host code.
_SHARED_FIELD = re.compile(
    r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : .*!llvm\.struct<\(array<3 x i32>, array<3 x i32>"
)


@dataclass(frozen=True)
class Static:
    """Figures of one compiled kernel.

    Attributes:
        registers: registers per thread.
        local_bytes: local memory per thread; above 0, registers are spilled.
        shared_bytes: shared memory per CTA, static and dynamic.
        threads: threads per CTA.
        code_bytes: size of the machine code.
        instructions: number of occurrences of each instruction; empty without a disassembler.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    threads: int
    code_bytes: int
    instructions: dict[str, int] = field(default_factory=dict)

    @property
    def spills(self) -> bool:
        return self.local_bytes > 0 or any(name in self.instructions for name in LOCAL)


def measure(kernel: DeviceKernel, nvdisasm: Path | None) -> Static:
    """Compile and inspect ``kernel``; instructions are counted only if ``nvdisasm`` is given."""
    return measure_compiled(compile_kernel(kernel), nvdisasm)


def measure_compiled(function: Any, nvdisasm: Path | None) -> Static:
    """Inspect a result of ``cute.compile``; ``nvdisasm`` None: instructions are not counted.

    Raises:
        UnreadableBinary: ``function`` does not have exactly one kernel and one launch.
        NoDisassembler: ``nvdisasm`` cannot read the binary.
    """
    cubin = cubin_of(function.ir_module)
    listing = disassemble(cubin.image, nvdisasm) if nvdisasm else ""
    return Static(
        registers=cubin.registers,
        local_bytes=cubin.local_bytes,
        shared_bytes=cubin.shared_bytes + dynamic_shared_bytes(str(function.ir_module)),
        threads=cubin.threads,
        code_bytes=cubin.code_bytes,
        instructions=count(listing),
    )


def cubin_of(module: Any) -> Cubin:
    """Cubin in the module of a compiled kernel.

    Raises:
        UnreadableBinary: the module has no GPU binary, or a binary without exactly one kernel.
    """
    values: list[bytes] = []
    for operation in module.body.operations:
        if operation.operation.name == "llvm.mlir.global" and "value" in operation.attributes:
            value: Callable[[], bytes] | bytes = getattr(
                operation.attributes["value"], "value_bytes", b""
            )
            if isinstance(value, bytes) and value[:4] == FAT_MAGIC:
                values.append(value)
    if len(values) != 1:
        raise UnreadableBinary(f"compiled kernel: has {len(values)} GPU binaries, must have one")
    return read_fat_binary(values[0])


def dynamic_shared_bytes(host_code: str) -> int:
    """Dynamic shared memory, in bytes, of the only launch in the host code's text.

    Raises:
        UnreadableBinary: the text has no launch, or launches that differ.
    """
    found = set()
    for address in _SHARED_FIELD.finditer(host_code):
        rest = host_code[address.end() :]
        stored = re.search(rf"llvm\.store (%\w+), {address[1]} : i64", rest)
        if stored is None:
            continue
        constants = re.findall(
            rf"{stored[1]} = llvm\.mlir\.constant\((\d+) : i64\)", host_code[: address.start()]
        )
        found |= set(map(int, constants[-1:]))  # names start again in every function
    if len(found) != 1:
        raise UnreadableBinary(
            f"host code: launches with dynamic shared memory of {sorted(found)} bytes, must be one"
        )
    return found.pop()
