"""Block-scaled ``torch._scaled_mm`` on the CPU: torch's own needs a GPU."""

import torch

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _values(matrix: torch.Tensor) -> torch.Tensor:
    """Values of a row-major fp8 or fp4 matrix, float64 [M, K]; fp4: lower K in the low nibble."""
    if matrix.dtype != torch.float4_e2m1fn_x2:
        return matrix.to(torch.float32).double()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64)
    packed = matrix.view(torch.uint8).int()
    return table[torch.stack((packed & 15, packed >> 4), -1)].flatten(-2)


def _scales(blocked: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales, float64 [rows, columns], from cuBLAS's tiles of 128 × 4."""
    down, across = -(-rows // 128), -(-columns // 4)
    tiles = blocked.to(torch.float32).double().reshape(down, across, 32, 4, 4)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(down * 128, across * 4)
    return plain[:rows, :columns]


def block_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Product [M, N] of row-major ``a`` [M, K] and column-major ``b`` [K, N].

    E8M0 scales cover 32 elements of K, E4M3 scales 16.
    """
    if bias is not None or scale_result is not None:
        raise NotImplementedError("block_scaled_mm: bias and scale_result are not emulated")
    vector = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}[scale_a.dtype]
    left, right = _values(a), _values(b.transpose(0, 1))
    groups = left.shape[1] // vector
    left = left * _scales(scale_a, left.shape[0], groups).repeat_interleave(vector, 1)
    right = right * _scales(scale_b, right.shape[0], groups).repeat_interleave(vector, 1)
    return (left @ right.T).to(out_dtype)
