"""Launches of ``indexer_quantize_q``, ``indexer_store_k`` and ``indexer_gather_k``."""

from torch import Tensor

from nvfp4_kernels.checks import strides_of
from nvfp4_kernels.devices import device_family
from nvfp4_kernels.indexer.call import GatherCall
from nvfp4_kernels.indexer.formats import Format
from nvfp4_kernels.indexer.kernels import E2M1_CONVERSION_FAMILIES
from nvfp4_kernels.indexer.vectors.gather import GatherArguments, GatherVectors
from nvfp4_kernels.indexer.vectors.layout import CHUNK, VectorLayout, alignment
from nvfp4_kernels.indexer.vectors.store import StoreArguments, StoreVectors
from nvfp4_kernels.runtime.compile import launch


def quantize_q(q: Tensor, fmt: Format, global_scale: Tensor | None) -> list[Tensor]:
    """See ``nvfp4_kernels.indexer.cache_op.indexer_quantize_q``."""
    tokens, heads, head_dim = q.shape
    out = fmt.empty(q, (tokens, heads), head_dim)
    if tokens and heads:
        layout = VectorLayout(fmt.name, head_dim)
        kernel = StoreVectors(layout, False, _converts_e2m1(q), _read_alignment(q), CHUNK)
        arguments = StoreArguments(
            x=q,
            data=out[0],
            scales=out[1] if len(out) > 1 else None,
            slots=None,
            page_stride=0,
            block_size=1,
            global_scale=global_scale,
            token_stride=strides_of(q)[0],
            head_stride=strides_of(q)[1],
            tokens=tokens,
            num_heads=heads,
        )
        launch(kernel, arguments)
    return out


def store_k(
    k: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    fmt: Format,
    block_size: int,
    global_scale: Tensor | None,
) -> None:
    """See ``nvfp4_kernels.indexer.cache_op.indexer_store_k``."""
    tokens, head_dim = k.shape
    if tokens:
        layout, align = VectorLayout(fmt.name, head_dim), alignment(*_page_offsets(cache))
        kernel = StoreVectors(layout, True, _converts_e2m1(k), _read_alignment(k), align)
        arguments = StoreArguments(
            x=k,
            data=cache,
            scales=None,
            slots=slot_mapping,
            page_stride=strides_of(cache)[0],
            block_size=block_size,
            global_scale=global_scale,
            token_stride=strides_of(k)[0],
            head_stride=0,
            tokens=tokens,
            num_heads=1,
        )
        launch(kernel, arguments)


def gather_k(call: GatherCall) -> list[Tensor]:
    """See ``nvfp4_kernels.indexer.cache_op.indexer_gather_k``."""
    out = call.fmt.empty(call.cache, (call.total_keys,), call.head_dim)
    batch = len(call.key_start) - 1
    if call.total_keys and batch:
        layout = VectorLayout(call.fmt.name, call.head_dim)
        arguments = GatherArguments(
            cache=call.cache,
            page_stride=strides_of(call.cache)[0],
            block_size=call.block_size,
            table=call.block_table,
            table_stride=strides_of(call.block_table)[0],
            starts=call.key_start,
            batch=batch,
            data=out[0],
            scales=out[1] if len(out) > 1 else None,
            rows=call.total_keys,
        )
        launch(GatherVectors(layout, alignment(*_page_offsets(call.cache))), arguments)
    return out


def _converts_e2m1(x: Tensor) -> bool:
    """Whether the device has instructions that convert to E2M1."""
    return device_family(x.device) in E2M1_CONVERSION_FAMILIES


def _page_offsets(cache: Tensor) -> tuple[int, int]:
    """Address of the first page, and stride of the pages in bytes."""
    return cache.data_ptr(), strides_of(cache)[0]


def _read_alignment(x: Tensor) -> int:
    """Alignment in bytes, up to 16, of all vectors of ``x``."""
    return alignment(x.data_ptr(), *(s * x.element_size() for s in strides_of(x)[:-1]))
