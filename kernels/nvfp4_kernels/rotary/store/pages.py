"""Heads of tokens in global memory, and the store of a key and its value into a paged cache."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Array, Int32, Int64, Vector

from nvfp4_kernels.rotary.store.head import LOAD_BYTES, Part
from nvfp4_kernels.rotary.store.tile import PIECE, Variant


class TokenHeads(NamedTuple):
    """Tensor [token, head, D] in global memory; strides in elements."""

    data: cute.Pointer
    token_stride: Int64
    head_stride: Int64

    def start(self, token: Int32, head: Int32) -> Int64:
        """Offset in elements of head ``head`` of token ``token``."""
        return Int64(token) * self.token_stride + Int64(head) * self.head_stride


class PagedCache(NamedTuple):
    """Cache [page, head, row, 2·D], where a row is a key and its value; strides in elements."""

    pages: cute.Pointer
    page_stride: Int64
    kv_head_stride: Int64
    row_stride: Int64


def store_pair(
    variant: Variant,
    cache: PagedCache,
    slot: Int64,
    head: Int32,
    part: Part,
    key: list[Vector],
    value: list[Vector],
    head_dim: int,
) -> None:
    """Store a thread's pieces of a key and its value in slot ``slot``."""
    start = slot // variant.page_size * cache.page_stride
    start += Int64(head) * cache.kv_head_stride
    start += slot % variant.page_size * cache.row_stride
    row, alignment = Array(cache.pages, shape=(1,)), PIECE if variant.fp8 else LOAD_BYTES
    row.store(key[0], start + part.first, alignment=alignment)
    row.store(key[1], start + part.second, alignment=alignment)
    row.store(value[0], start + head_dim + part.first, alignment=alignment)
    row.store(value[1], start + head_dim + part.second, alignment=alignment)
