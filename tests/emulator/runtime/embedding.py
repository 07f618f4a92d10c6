"""CuTe's compiler, extended to embed the PTX of compiled kernels in the GPU binary."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cutlass._mlir import ir
from cutlass.base_dsl.compiler import Compiler

from tests.emulator.runtime.fatbin import is_fat_binary, with_ptx
from tests.emulator.runtime.guards import guard

_PASS = "cute-to-nvvm{"
_PTXAS = "ptx-options="
_EMPTY = "assembled_alone"
_FFI = "__tvm_ffi_"
_PTXAS_OPTIONS = {
    "optimised": "",
    "plain": "-O1",  # -O0 takes longer
    "none": f"--entry={_EMPTY}",
}
_DUMP = re.compile(r"dump-ptx-path=([^\s}]+)")


class PtxEmbedding(Compiler):
    """Compiler that works like ``Compiler`` and adds the PTX to the compiled module's fat binary.

    The PTX then follows the module everywhere: into the JIT engine, CuTe's caches, object files.
    Kernels need not be matched by name.

    Attributes:
        guards: whether each shared array gets a guard behind it (``runtime/guards.py``).
        binaries: work of ptxas, see ``shim.Runtime.make_binaries``; without effect if the caller
            sets ptxas's options.
    """

    guards = False
    binaries = "optimised"

    def jit(self, module: ir.Module, opt_level: int = 0, shared_libs: Sequence[str] = ()) -> Any:
        if any(name.startswith(_FFI) for name in _functions(module)):
            return _NoEngine()
        return super().jit(module, 0, shared_libs)

    def compile(self, module: ir.Module, pipeline: str, *args: Any, **kwargs: Any) -> ir.Module:
        if _PASS not in pipeline:  # a pipeline for inspecting IR has no GPU binary
            return super().compile(module, pipeline, *args, **kwargs)
        arrays = guard(module) if self.guards else ""
        options = _PTXAS_OPTIONS[self.binaries]
        if options and _PTXAS not in pipeline:
            pipeline = pipeline.replace(_PASS, f"{_PASS}{_PTXAS}'{options}' ", 1)
            if self.binaries == "none":
                _add_empty_kernel(module)
        with tempfile.TemporaryDirectory(prefix="emulator-ptx-") as folder:
            given = _DUMP.search(pipeline)
            path = Path(given[1]) if given else Path(folder, "kernels")
            if not given:
                pipeline = pipeline.replace(_PASS, f"{_PASS}dump-ptx-path={path} ", 1)
            compiled = super().compile(module, pipeline, *args, **kwargs)
            written = sorted(path.parent.glob(f"{path.name}.*ptx"), key=lambda p: p.stat().st_mtime)
            if written:  # empty if the module has no kernels
                _embed(compiled, f"{written[-1].read_text()}\n{arrays}")
        return compiled


class _NoEngine:
    """Placeholder for the engine of a TVM FFI function; CuTe replaces the engine immediately.

    CuTe's own engine would compile the host code again, at a tenth of the compilation time, for an
    entry point that is never called.
    """

    def lookup(self, name: str) -> None:
        """Return None, for no entry: only TVM FFI's entries are used."""


def _functions(module: ir.Module) -> Iterator[str]:
    for operation in module.body.operations:
        if operation.operation.name == "llvm.func":
            yield operation.attributes["sym_name"].value


def leave_host_code_as_it_is() -> None:
    """Disable CuTe's optimisation of host code, which launches a kernel only a few times.

    CuTe also compares each string of the host code with every symbol, in Python; a symbol table
    replaces this search.
    """
    from cutlass.base_dsl.tvm_ffi_builder.mlir_builder import MLIRBuilder
    from cutlass.cutlass_dsl import tvm_ffi_provider

    def exists(_: MLIRBuilder, module: ir.Module, symbol: str) -> bool:
        return symbol in ir.SymbolTable(module.operation)

    MLIRBuilder._module_symbol_exists = exists

    support = tvm_ffi_provider._aot_support
    export = support.export_module_to_bytes

    def unoptimised(module: ir.Module, **options: Any) -> bytes:
        code: bytes = export(module, **(options | {"opt_level": 0}))
        return code

    support.export_module_to_bytes = unoptimised


def _add_empty_kernel(module: ir.Module) -> None:
    """Add an empty kernel to the module, because ptxas needs a kernel to assemble."""
    for operation in module.body.operations:
        if operation.operation.name == "gpu.module":
            with module.context, ir.Location.unknown():
                empty = f"llvm.func @{_EMPTY}() attributes {{nvvm.kernel}} {{ llvm.return }}"
                operation.operation.regions[0].blocks[0].append(ir.Operation.parse(empty))


def _embed(module: ir.Module, ptx: str) -> None:
    found = 0
    for operation in module.body.operations:
        if operation.operation.name != "llvm.mlir.global" or "value" not in operation.attributes:
            continue
        value = operation.attributes["value"]
        if not isinstance(value, ir.StringAttr) or not is_fat_binary(value.value_bytes):
            continue
        image = with_ptx(value.value_bytes, ptx)
        with module.context:
            operation.attributes["value"] = ir.StringAttr.get(image)
            operation.attributes["global_type"] = ir.TypeAttr.get(
                ir.Type.parse(f"!llvm.array<{len(image)} x i8>")
            )
        found += 1
    if found != 1:
        raise RuntimeError(f"compiled module: {found} GPU binaries, expected 1 to add the PTX to")
