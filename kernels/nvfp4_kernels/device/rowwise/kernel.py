"""Common part of the kernels that quantise rows: launch, and quantisation of loaded rows."""

from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass.cute as cute
from cutlass import Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.rowwise.output import RowQuantizer
from nvfp4_kernels.device.rowwise.place import Place, ctas, find, store_padding
from nvfp4_kernels.device.rowwise.tile import RowTile
from nvfp4_kernels.formats.terms import TermLayout


class RowKernel:
    """Launch and quantisation of rows, which a subclass loads or computes in ``rows``.

    A subclass is a frozen dataclass; the kernel's bundle of arguments has a field ``out``, the
    ``QuantizedRows``.

    Attributes:
        per_token: whether each row has its own global scale.
        tile: layout of a CTA's threads over rows.
        terms: layout of the result's NVFP4 terms.
    """

    per_token: bool
    tile: RowTile
    terms: TermLayout

    def prefetch(self, arguments: Any, place: Place) -> None:
        """Prefetch operands that no preceding kernel writes."""

    def rows(self, arguments: Any, place: Place) -> list[Vector]:
        """Load or compute the 16 elements that this thread quantises in each step."""
        raise NotImplementedError

    @cute.jit
    def __call__(self, arguments: Any, stream: cuda_driver.CUstream) -> None:
        """Launch a CTA for each tile of rows, rows of padding scales included."""
        out = arguments.out
        self.kernel(arguments).launch(
            grid=(ctas(self.tile, out.m, out.k, out.batch), 1, 1),
            block=(self.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: Any) -> None:
        """Quantise one CTA's rows, or store zero scales if all are padding."""
        out = arguments.out
        place = find(self.tile, out.m, out.k, self.terms)
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        self.prefetch(arguments, place)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        if place.live:
            quantizer = RowQuantizer(out.data, out.scales, out.scale, self.per_token)
            quantizer.write(place, self.rows(arguments, place))
        else:
            store_padding(place, out.scales)
