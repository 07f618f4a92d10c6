"""Arguments that ``sparse_attention`` refuses, and the messages."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, NoKernelError, sparse_attention
from nvfp4_kernels.attention import sparse_op
from tests.test_kernels.attention.attention_cases import BF16, FP8
from tests.test_kernels.attention.sparse_cases import SparseCase
from tests.test_kernels.attention.test_attention_arguments import (
    call,
    elsewhere,
    ints,
    named,
    spread,
)

ONE = torch.tensor(1.0)
CASE = SparseCase((3, 1), (20, 40), head_dim=32, sinks=True, listed=(6, 0, 5, 4), width=6)
GIVEN = CASE.problem().sparse()
Q, CACHE, TABLE = GIVEN["q"], GIVEN["kv_cache"], GIVEN["block_table"]
INDICES, LENS = GIVEN["indices"], GIVEN["lens"]
FP8_CACHE = {"kv_cache": CACHE.to(FP8), "k_scale": ONE, "v_scale": ONE}


def with_index(row: int, column: int, index: int) -> Tensor:
    changed = INDICES.clone()
    changed[row, column] = index
    return changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": Q.float()}, "q: dtype is float32, must be bfloat16, float16; convert it"),
        ({"q": Q[0]}, r"q: shape is \(4, 32\), must be \(T, Hq, D\); reshape it"),
        ({"q": torch.zeros(4, 4, 576, dtype=BF16)}, "q: D is 576, must be a multiple of 16 from"),
        ({"kv_cache": CACHE[..., :32]}, "kv_cache: its last dimension is 32, must be 64, twice q"),
        (FP8_CACHE | {"k_scale": None}, "k_scale: is missing, must be given with a float8_e4m3fn"),
        ({"v_scale": ONE}, "v_scale: is given with a cache of q's dtype.*leave it out"),
        ({"sinks": torch.zeros(2)}, r"sinks: shape is \(2,\), must be \(4,\); one logit per head"),
        ({"scale": 0.0}, "scale: is 0.0, must be positive and finite"),
        ({"soft_cap": 0.0}, "soft_cap: is 0.0, must be positive and finite"),
        ({"indices": INDICES.long()}, "indices: dtype is int64, must be int32; convert it"),
        ({"indices": INDICES[0]}, r"indices: shape is \(6,\), must have 2 dimension"),
        ({"indices": INDICES[1:]}, r"indices: shape is \(3, 6\), must be \(4, 6\); one list per r"),
        ({"indices": spread(INDICES)}, "indices: strides are .*, the last must be 1; call contig"),
        ({"lens": LENS.long()}, "lens: dtype is int64, must be int32; convert it"),
        ({"lens": LENS[1:]}, r"lens: shape is \(3,\), must be \(4,\); one length per row of q"),
        ({"lens": LENS.unsqueeze(0)}, r"lens: shape is \(1, 4\), must have 1 dimension"),
        ({"lens": spread(LENS)}, r"lens: strides are \(2,\), the last must be 1; call contiguous"),
        ({"query_start": torch.tensor([0, 3, 4])}, "query_start: dtype is int64, must be int32"),
        ({"query_start": ints()}, "query_start: is empty, must hold B \\+ 1 starts"),
        ({"block_table": TABLE.long()}, "block_table: dtype is int64, must be int32"),
        ({"block_table": TABLE[0]}, r"block_table: shape is .*, must have 2 dimension"),
        ({"block_table": TABLE[:1]}, r"block_table: shape is \(1, 5\), must be \(2, 5\); one row"),
        # Checks of tensor values, on the CPU.
        ({"query_start": ints(1, 3, 4)}, "query_start: begins with 1, must begin with 0"),
        ({"query_start": ints(0, 3, 2)}, "query_start: falls at 1, must not"),
        ({"query_start": ints(0, 3, 5)}, "query_start: ends with 5, must be at most 4, the rows"),
        ({"lens": ints(6, 0, -1, 4)}, "lens: is -1 for row 2, must be from 0 to 6, the columns"),
        ({"lens": ints(6, 0, 7, 4)}, "lens: is 7 for row 2, must be from 0 to 6, the columns of"),
        (
            {"lens": ints(6, 0, 6, 4)},
            r"indices: is 1073741824 at \(2, 5\), must be from 0 to 79, the keys that a row of "
            r"block_table holds, in the first lens\[2\] = 6 columns; count from",
        ),
        ({"indices": with_index(3, 2, -1)}, r"indices: is -1 at \(3, 2\), must be from 0 to 79"),
        ({"indices": with_index(0, 1, 80)}, r"indices: is 80 at \(0, 1\), must be from 0 to 79"),
        ({"block_table": TABLE[:, :0]}, r"indices: is \d+ at \(0, 0\), must be from 0 to -1"),
        ({"block_table": TABLE.clamp_max(-1)}, "block_table: holds page -1 for a listed key, must"),
        ({"kv_cache": CACHE[:0]}, "block_table: holds page .* for a listed key, .* 0 to -1"),
        ({"indices": with_index(3, 2, 79)}, "block_table: holds page 1073741824 for a listed key"),
    ],
    ids=named,
)
def test_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        sparse_attention(**GIVEN | changed)


@pytest.mark.parametrize(
    "name", ["kv_cache", "indices", "lens", "block_table", "query_start", "sinks"]
)
def test_on_two_devices(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}: is on meta, must be on cpu as q is"):
        call(sparse_op._sparse_attention, elsewhere(GIVEN, name))


def test_no_kernel() -> None:
    meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in GIVEN.items()}
    with pytest.raises(NoKernelError, match="sparse_attention: no float kernel for meta"):
        call(sparse_op._sparse_attention, meta)
    fp8 = {name: x.to("meta") for name, x in FP8_CACHE.items()}
    with pytest.raises(NoKernelError, match="sparse_attention: no fp8_kv kernel for meta"):
        call(sparse_op._sparse_attention, meta | fp8)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (Q.float(), "out: dtype is float32, must be bfloat16"),
        (Q[1:], r"out: shape is \(3, .*must be \(4, .*; one row per row of q"),
        (spread(Q), "out: strides are .*, must be contiguous; leave it out and copy the result"),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_out(out: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        sparse_attention(**GIVEN | {"out": out})
