"""``gemv``: the formula of ``gemm``, for at most 32 rows of activations."""

from dataclasses import replace

import pytest
import torch

from nvfp4_kernels import InvalidArgument, gemv
from tests.test_kernels.compilation import check_compiled
from tests.test_kernels.gemm.linear_cases import (
    Case,
    check_close,
    check_exact,
    grid_problem,
    random_problem,
)
from tests.test_kernels.gemm.refused import (
    EVERY_MISTAKE,
    check_refused,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = {
    "one block": Case(1, 1, 16),
    "one row": Case(1, 256, 128, out_dtype=BF16),
    "full": Case(32, 128, 64),
    "no rows": Case(0, 128, 64),
    "ragged": Case(7, 200, 80),
    "narrower than an atom": Case(3, 48, 16 * 13),
    "fp16 out": Case(9, 130, 96, out_dtype=FP16),
    "kv shards": Case(4, 64 + 64, 128, shards=(64, 64), out_dtype=BF16),
    "row scale": Case(17, 130, 96, row_scale=True),
    "bias": Case(8, 130, 96, bias=FP16),
    "batch": Case(5, 130, 48, batch=(3,)),
    "batched weight": Case(1, 130, 48, batch=(4,), batched_weight=True, row_scale=True),
    "empty batch": Case(1, 130, 48, batch=(0,), batched_weight=True),
    "w4a16 bf16": Case(2, 130, 96, a_dtype=BF16, out_dtype=BF16),
    "w4a16 fp16": Case(2, 130, 96, a_dtype=FP16, out_dtype=FP32),
    "everything": Case(
        6, 160, 96, shards=(100, 60), row_scale=True, bias=BF16, batch=(2,), out_dtype=BF16
    ),
    "Qwen3 0.6B down": Case(1, 1024, 3072, out_dtype=BF16),
    "Qwen3 30B-A3B gate, 4 experts": Case(
        1, 768, 2048, batch=(4,), batched_weight=True, out_dtype=BF16
    ),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@EVERY_CASE
def test_exact_on_grid_values(case: Case) -> None:
    check_exact(gemv, case)


@EVERY_CASE
def test_close_on_random_values(case: Case) -> None:
    check_close(gemv, case)


@pytest.mark.parametrize("name", ["everything", "w4a16 bf16"])
def test_compiled(name: str) -> None:
    problems = [random_problem(replace(CASES[name], m=m)) for m in (5, 17, 32)]
    check_compiled(gemv, [((), problem.args) for problem in problems], graphs=1)


@EVERY_MISTAKE
def test_refused(what: str) -> None:
    check_refused(gemv, what)


@pytest.mark.parametrize("a_dtype", [None, BF16], ids=["w4a4", "w4a16"])
def test_too_many_rows_are_refused(a_dtype: torch.dtype | None) -> None:
    problem = grid_problem(Case(33, 128, 64, a_dtype=a_dtype))
    with pytest.raises(InvalidArgument, match="a: M is 33, must be at most 32; use gemm for more"):
        problem.run(gemv)
