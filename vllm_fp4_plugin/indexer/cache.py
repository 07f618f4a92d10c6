"""Layout of the indexer's part of vLLM's paged cache."""

from typing import Any

from torch import Tensor

from nvfp4_kernels.indexer.formats import Format


def set_format(cache_layer: Any, fmt: Format, head_dim: int) -> None:
    """Set the size of a key in vLLM's cache spec: the bytes of ``head_dim`` elements in ``fmt``.

    Args:
        cache_layer: layer that represents the cache; its ``head_dim``, in bytes, determines the
            spec.
        fmt: format of the keys.
        head_dim: number of elements of a key.
    """
    cache_layer.head_dim = fmt.page_bytes(head_dim, 1)


def pages(kv_cache: Tensor) -> Tensor:
    """View vLLM's ``(pages, block_size, bytes of a key)`` as uint8 ``(pages, page_bytes)``.

    A page holds the data of all its keys, followed by all scales, so a row of vLLM's view is not a
    key. Gaps that vLLM leaves between pages stay.
    """
    return kv_cache.view(kv_cache.shape[0], -1)
