"""``indexer_quantize_q``, ``indexer_store_k`` and ``indexer_gather_k`` on GPUs."""

from torch import Tensor

from nvfp4_kernels.compile import launch
from nvfp4_kernels.devices import device_arch
from nvfp4_kernels.indexer.formats import Format
from nvfp4_kernels.indexer.vectors.gather import GatherVectors
from nvfp4_kernels.indexer.vectors.layout import VectorLayout, alignment
from nvfp4_kernels.indexer.vectors.store import StoreVectors


def quantize_q(q: Tensor, fmt: Format, global_scale: Tensor | None) -> list[Tensor]:
    """See ``nvfp4_kernels.indexer.cache_op.indexer_quantize_q``."""
    tokens, heads, head_dim = q.shape
    out = fmt.empty(q, (tokens, heads), head_dim)
    if tokens and heads:
        kernel = StoreVectors(
            VectorLayout(fmt.name, head_dim), False, _native(q), _read_alignment(q), 16
        )
        scales = out[1] if len(out) > 1 else None
        launch(
            kernel, q, out[0], scales, None, global_scale,
            q.stride(0), q.stride(1), 0, tokens, heads, 1,
        )  # fmt: skip
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
        align = alignment(cache.data_ptr(), cache.stride(0))
        kernel = StoreVectors(
            VectorLayout(fmt.name, head_dim), True, _native(k), _read_alignment(k), align
        )
        launch(
            kernel, k, cache, None, slot_mapping, global_scale,
            k.stride(0), 0, cache.stride(0), tokens, 1, block_size,
        )  # fmt: skip


def gather_k(
    cache: Tensor,
    block_table: Tensor,
    key_start: Tensor,
    total_keys: int,
    head_dim: int,
    fmt: Format,
    block_size: int,
) -> list[Tensor]:
    """See ``nvfp4_kernels.indexer.cache_op.indexer_gather_k``."""
    out = fmt.empty(cache, (total_keys,), head_dim)
    batch = len(key_start) - 1
    if total_keys and batch:
        kernel = GatherVectors(
            VectorLayout(fmt.name, head_dim), alignment(cache.data_ptr(), cache.stride(0))
        )
        launch(
            kernel, cache, block_table, key_start, out[0], out[1] if len(out) > 1 else None,
            cache.stride(0), block_size, block_table.stride(0), batch, total_keys,
        )  # fmt: skip
    return out


def _native(x: Tensor) -> bool:
    """Whether the device itself converts to E2M1."""
    return device_arch(x.device) == "sm_100"


def _read_alignment(x: Tensor) -> int:
    apart = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    return alignment(x.data_ptr(), *(s * x.element_size() for s in apart))
