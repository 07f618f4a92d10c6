"""The kernel of ``merge_segments`` on sm_100, and its launch."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass.cute as cute
import torch
from cutlass import AddressSpace, Array, Float32, Int32, Int64, Uint8
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.attention.merge.choose import THREADS, VECTOR_BYTES, choose_prefetch
from nvfp4_kernels.attention.merge.merge import MergeArguments, SegmentMerge
from nvfp4_kernels.attention.merge.tile import MergeTile
from nvfp4_kernels.checks import InvalidArgument, check_layout
from nvfp4_kernels.device.arguments import example, without_unread
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.formats.nvfp4_rows import Nvfp4Rows
from nvfp4_kernels.runtime.compile import launch


@dataclass(frozen=True)
class MergeSegmentsSm100:
    """One compiled variant of the merge kernel; each thread merges 16 bytes of a row.

    Attributes:
        tile: work of a thread.
    """

    tile: MergeTile

    def signature(self) -> tuple[MergeArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        scalars = ("lses", "sinks", "lse", "input_scale")
        out = Uint8 if self.tile.quantized else TYPES[self.tile.out_dtype]
        types = {"outs": TYPES[self.tile.dtype], "out": out, "scales": Uint8}
        types |= dict.fromkeys(scalars, Float32)
        return (example(MergeArguments, types, dict.fromkeys(scalars, 4)),)

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of the arguments that the kernel does not read."""
        sinks = () if self.tile.sinks else ("sinks",)
        return sinks if self.tile.quantized else (*sinks, "scales", "input_scale", "first_row")

    @cute.jit
    def __call__(self, arguments: MergeArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a thread per 16 bytes of one segment."""
        threads = Int64(arguments.rows) * self.tile.vectors
        self.kernel(without_unread(arguments, self.unread)).launch(
            grid=(cute.ceil_div(threads, THREADS).to(Int32), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: MergeArguments) -> None:
        """Merge this thread's vector of a row; the first thread of a row also stores the LSE."""
        tile, thread = self.tile, cute.arch.thread_idx()[0]
        number = Int64(cute.arch.block_idx()[0]) * THREADS + thread
        row = (number // tile.vectors).to(Int32)
        column = (number % tile.vectors).to(Int32) * tile.width
        elements = tile.prefetch * THREADS * tile.width
        slots = Array(TYPES[tile.dtype], elements, space=AddressSpace.smem, alignment=VECTOR_BYTES)
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        merge = SegmentMerge(tile)
        merge.run(arguments, row, column, row < arguments.rows, slots, thread, THREADS)


def merge_segments(
    outs: Tensor,
    lses: Tensor,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | Nvfp4Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.attention.merge.op.merge_segments``; writes to ``out`` unless None.

    With an NVFP4 ``out``, ``outs`` is ``(S, tokens, heads, D)``, and the merged result is rounded
    to ``out_dtype`` before quantisation.

    Raises:
        InvalidArgument: a tensor is misaligned or not contiguous, or a row of D elements is not a
            multiple of 16 bytes.
    """
    segments, *_, head_dim = outs.shape
    for name, x in (("outs", outs), ("lses", lses), ("sinks", sinks)):
        check_layout(name, x)
    if head_dim * outs.element_size() % VECTOR_BYTES:
        raise InvalidArgument(
            f"outs: D is {head_dim}, must be a multiple of {VECTOR_BYTES // outs.element_size()}, "
            f"{VECTOR_BYTES} bytes; pad it with zeros"
        )
    out = outs.new_empty(outs.shape[1:], dtype=out_dtype) if out is None else out
    nvfp4, data = (out, out.data) if isinstance(out, Nvfp4Rows) else (None, out)
    lse = lses.new_empty(lses.shape[1:])
    if lse.numel():
        rows = lse.numel()
        sms = device_facts(outs.device).sms
        prefetch = choose_prefetch(segments, rows, head_dim * outs.element_size(), sms)
        tile = merge_tile(outs, sinks, out_dtype, nvfp4 is not None, prefetch)
        arguments = merge_arguments(outs, lses, sinks, out, lse)
        launch(MergeSegmentsSm100(tile), arguments)
    return data, lse


def merge_tile(
    outs: Tensor, sinks: Tensor | None, out_dtype: torch.dtype, quantized: bool, prefetch: int
) -> MergeTile:
    """Tile of the kernel that merges ``outs`` ``(S, ..., D)``."""
    dtypes = dtype_name(outs.dtype), dtype_name(out_dtype)
    return MergeTile(*dtypes, outs.shape[-1], sinks is not None, prefetch, quantized)


def merge_arguments(
    outs: Tensor, lses: Tensor, sinks: Tensor | None, out: Tensor | Nvfp4Rows, lse: Tensor
) -> MergeArguments:
    """Arguments of a launch of the merge kernel; see ``merge_segments``."""
    nvfp4, data = (out, out.data) if isinstance(out, Nvfp4Rows) else (None, out)
    return MergeArguments(
        outs=outs,
        lses=lses,
        sinks=sinks,
        out=data,
        lse=lse,
        segments=len(outs),
        rows=lse.numel(),
        num_heads=lse.shape[-1] if lse.ndim > 1 else 1,
        **scale_arguments(nvfp4),
    )


def scale_arguments(rows: Nvfp4Rows | None) -> dict[str, Any]:
    """Launch arguments for the scales of a quantised result; null and 0 if ``rows`` is None."""
    if rows is None:
        return {"scales": None, "input_scale": None, "first_row": 0}
    return {
        "scales": rows.scales,
        "input_scale": rows.global_scale,
        "first_row": rows.first_row,
    }
