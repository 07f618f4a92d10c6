"""Layout of the indexer's part of vLLM's paged cache."""

from typing import Any

from torch import Tensor

from nvfp4_kernels.indexer.formats import Format


def set_format(cache_layer: Any, fmt: Format, head_dim: int) -> None:
    """Have vLLM allocate as many bytes as keys of ``head_dim`` take in ``fmt``.

    Args:
        cache_layer: the layer that stands for the cache, whose spec is made from its ``head_dim``,
            which counts bytes.
        fmt: format of the keys.
        head_dim: elements of a key.
    """
    cache_layer.head_dim = fmt.page_bytes(head_dim, 1)


def pages(kv_cache: Tensor) -> Tensor:
    """View vLLM's ``(pages, block_size, bytes of a key)`` as uint8 ``(pages, page_bytes)``.

    A page holds the data of all its keys and then their scales, so that a row of vLLM's is no key.
    What vLLM leaves between pages stays there.
    """
    return kv_cache.view(kv_cache.shape[0], -1)
