"""Guards behind the shared arrays of kernels that CuTe DSL compiles.

The IR passed to CuTe's compiler still has one ``cute.memref.alloca`` per array; the compiled PTX
has only offsets. Each array is extended by a guard, and the resulting layout is appended to the
PTX.
"""

import re
from typing import Any

from cutlass._mlir import ir

from tests.emulator.ptx.shared_arrays import comments, end_of, guard_bytes, guard_of, laid_out
from tests.emulator.ptx.syntax import SharedArray

_ALLOCA = "cute.memref.alloca"
_TYPE = re.compile(r'!cute\.memref<i8, smem(?:, align<(\d+)>)?, "(\d+:1|1:0)">')
_SHARED = ", smem"
_USER_PARTITION = 1
_REACH = 255 * 1024  # behind the kilobyte that belongs to the system
_PLACE = re.compile(r'"([^"]+)":(\d+)')


def guard(module: ir.Module) -> str:
    """Put guards behind the shared arrays of a module that is about to be compiled.

    Returns:
        Text to append to the module's PTX.

    Raises:
        RuntimeError: the module has shared memory of unknown layout.
    """
    found: dict[str, list[Any]] = {}
    checks: list[Any] = []

    def visit(operation: Any) -> ir.WalkResult:
        if operation.name == _ALLOCA and _SHARED in str(operation.results[0].value.type):
            found.setdefault(_kernel_of(operation), []).append(operation)
        elif operation.name == "arith.cmpi":
            checks.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    told, added = "", {}
    with module.context:
        for kernel, operations in found.items():
            arrays = laid_out([_guarded(operation) for operation in operations])
            told += comments(kernel, arrays)
            added[kernel] = guard_bytes(arrays)
            if end_of(arrays) > _REACH:
                raise RuntimeError(
                    f"{kernel}: shared memory of {end_of(arrays)} bytes with guards, must be at "
                    f"most {_REACH}, as far as descriptors reach; use fewer arrays, or compile "
                    "without guards"
                )
        for check in checks:
            _raise_limit(check, added)
    return told


def _kernel_of(operation: Any) -> str:
    while operation is not None:
        if operation.name == "cuda.kernel":
            return str(ir.StringAttr(operation.attributes["sym_name"]).value)
        operation = operation.parent and operation.parent.operation
    raise RuntimeError("shared memory outside of a kernel: must be an Array in the kernel itself")


def _guarded(operation: Any) -> SharedArray:
    """Extend an array by its guard; returns the array with its guard."""
    result = operation.results[0].value  # the tensor made by CuTe's bindings
    match = _TYPE.fullmatch(str(result.type))
    partition = operation.attributes["smem.partition_id"]
    if match is None or ir.IntegerAttr(partition).value != _USER_PARTITION:
        raise RuntimeError(
            f"shared memory {result.type} in {partition}: must be bytes in partition "
            f"{_USER_PARTITION}, as of cutlass.Array; or compile without guards"
        )
    align, nbytes = int(match[1] or 1), int(match[2].partition(":")[0])
    place = _PLACE.search(str(operation.location))
    source = f"{place[1].rpartition('/')[2]}:{place[2]}" if place else ""
    longer = nbytes + guard_of(nbytes)
    result.set_type(ir.Type.parse(str(result.type).replace(f'"{match[2]}"', f'"{longer}:1"')))
    return SharedArray(0, nbytes, guard_of(nbytes), align, source)


def _raise_limit(check: Any, added: dict[str, int]) -> None:
    """Raise the limit of CuTe's own size check by the size of the guards."""
    size, limit = (operand.owner for operand in check.operands)
    if getattr(size, "name", "") != "cute.kernel_smem_size":
        return
    kernel = re.search(r"@kernels::@([\w.$]+)", str(size))
    if kernel and kernel[1] in added:
        attribute = ir.IntegerAttr(limit.attributes["value"])
        more = ir.IntegerAttr.get(attribute.type, attribute.value + added[kernel[1]])
        limit.attributes["value"] = more
