"""Common part of kernels that quantise rows to E4M3: launch, and quantisation of loaded rows."""

from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass.cute as cute
from cutlass import Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.row_vectors.fp8 import Fp8Quantizer
from nvfp4_kernels.device.row_vectors.place import Place, find
from nvfp4_kernels.device.row_vectors.tile import VectorTile


class Fp8RowKernel:
    """Launch and quantisation of rows, which a subclass loads or computes in ``rows``.

    A subclass is a frozen dataclass; the kernel's bundle of arguments has a field ``out``, the
    ``Fp8Rows``.

    Attributes:
        per_token: whether each row has its own scale.
        tile: layout of a CTA's threads over a row, or over a part of one.
    """

    per_token: bool
    tile: VectorTile

    @property
    def whole_rows(self) -> bool:
        """Whether a CTA must have a whole row."""
        return self.per_token

    def early(self, arguments: Any, place: Place) -> Any:
        """Load operands that no preceding kernel writes."""
        return None

    def rows(self, arguments: Any, place: Place, early: Any) -> list[Vector]:
        """Load or compute the 8 elements that this thread quantises in each step.

        ``early``: result of the method of that name.
        """
        raise NotImplementedError

    @cute.jit
    def __call__(self, arguments: Any, stream: cuda_driver.CUstream) -> None:
        """Launch a CTA for each row, or for each part of one."""
        out = arguments.out
        parts = 1 if self.whole_rows else cute.ceil_div(out.k, self.tile.elements)
        self.kernel(arguments).launch(
            grid=(out.m * parts, 1, 1),
            block=(self.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: Any) -> None:
        """Quantise one CTA's elements."""
        out = arguments.out
        place = find(self.tile, out.k, self.whole_rows)
        # At once: the next kernel loads its weights while the preceding kernel ends.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        early = self.early(arguments, place)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        rows = self.rows(arguments, place, early)
        Fp8Quantizer(out, self.per_token).write(place, rows)
