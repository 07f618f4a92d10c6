"""Layout of the indexer's part of vLLM's paged cache."""

from typing import Any

from torch import Tensor

from nvfp4_kernels.indexer.formats import Format


def set_format(cache_layer: Any, fmt: Format, head_dim: int) -> None:
    """Set the bytes per key in vLLM's cache spec, scales included.

    Args:
        cache_layer: layer that represents the cache. Its attribute ``head_dim``, from which vLLM
            makes the spec, is set to the number of bytes.
        fmt: format of the keys.
        head_dim: number of elements of a key.
    """
    cache_layer.head_dim = fmt.page_bytes(head_dim, 1)


def pages(kv_cache: Tensor) -> Tensor:
    """View vLLM's uint8 ``(pages, block_size, bytes of a key)`` as ``(pages, page_bytes)``.

    A page holds the data of all its keys, then all scales, so that row ``[page, i]`` of vLLM's view
    is not key i. Gaps that vLLM leaves between pages remain in the stride.
    """
    return kv_cache.view(kv_cache.shape[0], -1)
