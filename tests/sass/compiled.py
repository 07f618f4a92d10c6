"""Compilation, disassembly and checks of kernels in separate processes."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.runtime.compile import compile_kernel
from nvfp4_kernels.tool.build import prepare
from nvfp4_kernels.tool.instructions import disassemble
from nvfp4_kernels.tool.static import cubin_of
from tests.sass.descriptors import Checked, check


def check_all(
    specs: Sequence[KernelSpec], arch: str, nvdisasm: Path, jobs: int
) -> Iterator[tuple[KernelSpec, Checked]]:
    """Compile and check kernels in ``jobs`` processes: CuTe DSL binds a process to a runtime."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), prepare, (arch,)) as pool:
        yield from zip(specs, pool.map(check_one, specs, [nvdisasm] * len(specs)), strict=True)


def check_one(spec: KernelSpec, nvdisasm: Path) -> Checked:
    """Compile and check one kernel in this process."""
    image = cubin_of(compile_kernel(spec.kernel()).ir_module).image
    return check(disassemble(image, nvdisasm))
