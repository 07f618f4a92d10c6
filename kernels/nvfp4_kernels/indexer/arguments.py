"""Argument checks shared by the indexer's ops: vectors, caches and indices."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_shape, reads_contents
from nvfp4_kernels.indexer.formats import Format
from nvfp4_kernels.indexer.kernels import HEAD_DIM_STEP, MAX_HEAD_DIM, MAX_TOP_K


def check_head_dim(name: str, head_dim: int) -> None:
    """Raise unless ``head_dim`` is a multiple of 32 from 32 to 256."""
    if head_dim % HEAD_DIM_STEP or not 0 < head_dim <= MAX_HEAD_DIM:
        raise InvalidArgument(
            f"{name}: D is {head_dim}, must be a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} "
            f"to {MAX_HEAD_DIM}; pad queries and keys with zeros"
        )


def check_unquantized(name: str, x: Tensor, form: str) -> None:
    """Raise unless ``x`` is bfloat16 with ``form``'s dimensions, a valid D and a last stride of 1.

    ``form``: shape as text, e.g. ``(T, H, D)``.
    """
    check_dtype(name, x, (torch.bfloat16,))
    check_form(name, x, form)
    check_head_dim(name, x.shape[-1])
    if x.numel() and x.stride(-1) != 1:
        raise InvalidArgument(
            f"{name}: strides are {x.stride()}, the last must be 1; call contiguous() on it"
        )


def check_global_scale(fmt: Format, global_scale: Tensor | None) -> None:
    """Raise unless nvfp4 has a positive, finite global scale, and any other format has none."""
    if fmt.name != "nvfp4":
        if global_scale is not None:
            raise InvalidArgument(
                f"global_scale: is given with {fmt.name}, which has none; leave it out"
            )
        return
    if global_scale is None:
        raise InvalidArgument(
            "global_scale: is missing, must be given with nvfp4; pass a float32 scalar tensor, "
            "max|x| / 2688 over calibration data"
        )
    check_dtype("global_scale", global_scale, (torch.float32,))
    check_shape("global_scale", global_scale, (), "one scale for all vectors")
    if reads_contents(global_scale):
        value = global_scale.item()
        if not 0 < value < float("inf"):
            raise InvalidArgument(
                f"global_scale: is {value}, must be positive and finite; max|x| / 2688 is usual"
            )


def check_stored(
    fmt: Format, name: str, data: Tensor, scales: Tensor | None, form: str, optional: bool = False
) -> int:
    """Raise unless data and scales have ``fmt``'s dtypes and shapes; return D.

    ``form``: shape of the unpacked data as text, e.g. ``(T, H, D)``. Scales are None if the format
    has no scales, and may be None if ``optional``.
    """
    check_dtype(name, data, (fmt.data_dtype,))
    check_form(name, data, form if fmt.packed == 1 else form.replace("D)", "D/2)"))
    head_dim = data.shape[-1] * fmt.packed
    check_head_dim(name, head_dim)
    check_contiguous(name, data)
    if fmt.scale_dtype is None:
        if scales is not None:
            raise InvalidArgument(
                f"{name}_scales: are given with {fmt.name}, which has none; leave them out"
            )
    elif scales is not None:
        check_dtype(f"{name}_scales", scales, (fmt.scale_dtype,))
        expected = (*data.shape[:-1], *fmt.scale_shape(head_dim))
        check_shape(f"{name}_scales", scales, expected, f"as {fmt.name} has them")
        check_contiguous(f"{name}_scales", scales)
    elif not optional:
        raise InvalidArgument(
            f"{name}_scales: are missing, must be given with {fmt.name}; pass the "
            f"scales that {name} was quantised with"
        )
    return head_dim


def check_cache(cache: Tensor, fmt: Format, head_dim: int, block_size: int) -> None:
    """Raise unless ``cache`` is uint8 ``(pages, page_bytes)``, and pages do not overlap.

    ``page_bytes`` must be the size of ``block_size`` keys of ``head_dim`` elements in ``fmt``.
    """
    check_dtype("cache", cache, (torch.uint8,))
    check_form("cache", cache, "(pages, page_bytes)")
    if block_size < 1:
        raise InvalidArgument(
            f"block_size: is {block_size}, must be 1 or more keys of a page; 64 is usual"
        )
    expected = fmt.page_bytes(head_dim, block_size)
    if cache.shape[1] != expected:
        raise InvalidArgument(
            f"cache: a page has {cache.shape[1]} bytes, must have {expected}, for {block_size} "
            f"{fmt.name} keys of {head_dim}; check fmt and block_size, or take a view of the pages"
        )
    pages, stride = len(cache), cache.stride()
    if cache.numel() and (stride[1] != 1 or (pages > 1 and stride[0] < expected)):
        raise InvalidArgument(
            f"cache: strides are {stride}, the last must be 1 and the first at least {expected}, "
            "so that no two pages overlap; take a view of the pages"
        )


def check_block_table(block_table: Tensor, sequences: int) -> None:
    """Raise unless ``block_table`` is int32 ``(sequences, P)`` with a last stride of 1."""
    check_dtype("block_table", block_table, (torch.int32,))
    check_form("block_table", block_table, "(B, P)")
    expected = (sequences, block_table.shape[1])
    check_shape("block_table", block_table, expected, "one row per sequence")
    if block_table.numel() and block_table.shape[1] != 1 and block_table.stride(1) != 1:
        raise InvalidArgument(
            f"block_table: strides are {block_table.stride()}, the last must be 1; call "
            "contiguous() on it"
        )


def check_pages(cache: Tensor, block_table: Tensor, block_size: int, lengths: Tensor) -> None:
    """Raise unless ``block_table`` has pages of ``cache`` for sequence b's ``lengths[b]`` keys."""
    room = block_table.shape[1] * block_size
    if len(lengths) and int(lengths.max()) > room:
        raise InvalidArgument(
            f"block_table: has room for {room} keys per sequence, must have it for "
            f"{int(lengths.max())}; widen it"
        )
    first_keys = torch.arange(block_table.shape[1]) * block_size
    needed = first_keys < lengths.unsqueeze(1)
    wrong = block_table[needed & ((block_table < 0) | (block_table >= len(cache)))]
    if wrong.numel():
        raise InvalidArgument(
            f"block_table: holds page {wrong[0]}, must be from 0 to {len(cache) - 1}, the pages of "
            "cache; check the sequence's pages"
        )


def check_indices(name: str, x: Tensor, shape: tuple[int, ...], remedy: str) -> None:
    """Raise unless ``x`` is contiguous int32 of ``shape``; a shape error ends with ``remedy``."""
    check_dtype(name, x, (torch.int32,))
    check_shape(name, x, shape, remedy)
    check_contiguous(name, x)


def refuse_keys(keys: object) -> InvalidArgument:
    """Build the error for keys that are neither ``IndexerKeys`` nor ``IndexerPagedKeys``."""
    return InvalidArgument(
        f"keys: is {type(keys).__name__}, must be IndexerKeys(k, k_scales, ks, ke) or "
        "IndexerPagedKeys(cache, context_lens, block_table, max_context_len, block_size); make one "
        "of the tensors"
    )


def check_top_k(top_k: int) -> None:
    """Raise unless ``top_k`` is from 1 to ``MAX_TOP_K``."""
    if not 1 <= top_k <= MAX_TOP_K:
        raise InvalidArgument(
            f"top_k: is {top_k}, must be from 1 to {MAX_TOP_K}; choose in several calls"
        )


def check_count(name: str, count: int, remedy: str) -> None:
    """Raise if ``count`` is negative; the error ends with ``remedy``."""
    if count < 0:
        raise InvalidArgument(f"{name}: is {count}, must be 0 or more; {remedy}")


def check_form(name: str, x: Tensor, form: str) -> None:
    """Raise unless ``x`` has as many dimensions as ``form`` names, e.g. 3 for ``(T, H, D)``."""
    if x.ndim != form.count(",") + 1:
        raise InvalidArgument(f"{name}: shape is {tuple(x.shape)}, must be {form}; reshape it")


def check_contiguous(name: str, x: Tensor) -> None:
    """Raise unless ``x`` is contiguous."""
    if not x.is_contiguous():
        raise InvalidArgument(
            f"{name}: strides are {x.stride()} for shape {tuple(x.shape)}, must be contiguous; "
            "call contiguous() on it"
        )
