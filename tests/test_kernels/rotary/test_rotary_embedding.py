"""``rotary_embedding``: the reference against vLLM, the kernel of sm_90 against the reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from nvfp4_kernels import InvalidArgument, NoKernelError, rotary_embedding
from nvfp4_kernels.rotary import op as rotary_op
from nvfp4_kernels.rotary import reference
from nvfp4_kernels.rotary.choose import choose_config
from nvfp4_kernels.rotary.kernels import KERNELS
from nvfp4_kernels.rotary.tile import MAX_HEAD_DIM
from tests import devices
from tests.emulator import EAGER, Gpu
from tests.test_kernels.bits import check_equal
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.rotary.rotary_cases import BF16, CASES, EVERY_CASE, FP16, Case, check_kernel
from tests.test_kernels.rowwise.row_cases import EVERY_SCHEDULE

SM90 = pytest.mark.arch("sm_90")
ONE_SCHEDULE = pytest.mark.schedules("random 1")
CPU = torch.device("cpu")


# --- the formula ------------------------------------------------------------------------------


# vLLM's own op fails without tokens.
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.m])
def test_reference(name: str) -> None:
    """The reference rounds once; vLLM rounds each product, and then the sum."""
    case = CASES[name]
    tokens, (positions, q, k, cache) = case.m, case.arguments()
    theirs = RotaryEmbedding.forward_static(
        positions, q.reshape(tokens, -1), k.reshape(tokens, -1), case.head_dim, case.rotary_dim,
        cache, is_neox_style=True,
    )  # fmt: skip
    unit, least = torch.finfo(case.dtype).eps / 2, torch.finfo(case.dtype).smallest_normal
    half, rotary = case.rotary_dim // 2, case.rotary_dim
    cos, sin = (x.double().abs().unsqueeze(1) for x in cache[positions].split(half, -1))
    for x, ours, other in zip(
        (q, k), rotary_embedding(positions, q, k, cache), theirs, strict=True
    ):
        assert ours.shape == x.shape
        other = other.view(x.shape)
        assert torch.equal(ours[..., rotary:], x[..., rotary:])
        assert torch.equal(other[..., rotary:], x[..., rotary:])
        low, high = (part.double().abs() for part in x[..., :rotary].split(half, -1))
        products = torch.cat((low * cos + high * sin, high * cos + low * sin), -1)
        off = (ours.double() - other.double())[..., :rotary].abs()
        # Half an ulp each of the products, of vLLM's sum and of our result; for subnormals, of all
        # four.
        assert bool((off <= 3 * unit * products * (1 + 2 * unit) + 4 * unit * least).all())


def test_formula_on_integers() -> None:
    """Integer results equal the formula, element by element."""
    half, q = 4, torch.randint(-8, 9, (3, 2, 10)).to(BF16)
    cache = 2.0 ** torch.randint(-2, 3, (7, 2 * half)).to(BF16)
    positions = torch.tensor([6, 0, 3])
    found, _ = rotary_embedding(positions, q, q[:, :1], cache)
    for token, position in enumerate(positions.tolist()):
        row = cache[position].tolist()
        for head in range(2):
            x = q[token, head].tolist()
            lows = [x[i] * row[i] - x[i + half] * row[i + half] for i in range(half)]
            highs = [x[i + half] * row[i] + x[i] * row[i + half] for i in range(half)]
            assert found[token, head].tolist() == [*lows, *highs, *x[2 * half :]]


def test_labels() -> None:
    assert KERNELS.select(CPU, "float").label == "nvfp4_rotary_embedding/reference (cpu)"


# --- sm_90 ------------------------------------------------------------------------------------


@SM90
@ONE_SCHEDULE
@EVERY_CASE
def test_kernel(case: Case, op_device: torch.device) -> None:
    check_kernel(case, op_device)


@SM90
@EVERY_SCHEDULE
def test_every_schedule(op_device: torch.device) -> None:
    check_kernel(CASES["partial, D = 64"], op_device)


@SM90
@ONE_SCHEDULE
def test_strides(op_device: torch.device) -> None:
    """Separate q and k with other strides; positions start at any element."""
    positions, q, k, cache = CASES["ragged"].arguments(op_device)
    expected = reference.rotary_embedding(*(x.cpu() for x in (positions, q, k, cache)))
    check_equal(rotary_embedding(positions, q.contiguous(), k.contiguous(), cache), expected)
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    late = torch.cat((positions[:1], positions))[1:]
    found = rotary_embedding(late, by_head, k, cache)
    check_equal(found, expected)
    assert all(x.is_contiguous() for x in found)


@SM90
@ONE_SCHEDULE
def test_not_finite(op_device: torch.device) -> None:
    """Unrotated elements are copied unchanged, even if other elements are not finite."""
    positions, q, k, cache = CASES["partial, D = 64"].arguments(op_device)
    q[1, 2, 32:] = torch.inf
    q[0, 1, 3] = torch.nan
    found, _ = rotary_embedding(positions, q, k, cache)
    expected, _ = reference.rotary_embedding(*(x.cpu() for x in (positions, q, k, cache)))
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@SM90
@EVERY_SCHEDULE
def test_dependent_launches(op_device: torch.device) -> None:
    """A second launch may start before the first has ended, and reads the first one's result."""
    positions, q, k, cache = CASES["ragged"].arguments(op_device)
    found = rotary_embedding(positions, *rotary_embedding(positions, q, k, cache), cache)
    given = positions.cpu(), q.cpu(), k.cpu(), cache.cpu()
    once = reference.rotary_embedding(*given)
    check_equal(found, reference.rotary_embedding(given[0], *once, given[-1]))


def test_each_byte_once() -> None:
    """Threads of every head read cosines and sines: once from HBM, then from cache."""
    with devices.emulated_ops(EAGER, "sm_90") as gpu:
        for case in (Case(19, 24, 8, 128, 128), Case(515, 3, 1, 64, 32)):
            positions, q, k, cache = case.arguments()
            written = rotary_embedding(positions, q, k, cache)
            counted = gpu.launches[-1].counters.nbytes
            rows = len(positions.unique()) * cache[0].nbytes
            vectors = sum(x.numel() * x.element_size() for x in (q, k))
            assert counted["HBM read, each byte once"] == positions.nbytes + rows + vectors
            assert counted["global write"] == sum(x.nbytes for x in written) == vectors
            heads = case.q_heads + case.k_heads
            tile = choose_config(case.m, heads, case.head_dim, case.rotary_dim)
            assert heads % tile.heads == 0  # no idle thread, which would read the last head again
            ctas = case.m * heads // tile.heads
            warps = ctas * -(-tile.threads // 32)  # all threads of a warp read one position
            assert counted["global read"] == warps * 8 + ctas * tile.threads * 32 + vectors


def test_order_of_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is: release dependents, load cosines and sines, wait, load q and k, store."""
    devices.cutlass_or_skip()
    seen: list[str] = []
    load = Gpu.load
    monkeypatch.setattr(Gpu, "load", lambda gpu, ptx: (seen.append(ptx), load(gpu, ptx))[1])
    case = Case(600, 6, 2, 48, 48)
    with devices.emulated_ops(EAGER, "sm_90"):
        rotary_embedding(*case.arguments())
    assert choose_config(600, 8, 48, 48).steps == 2
    names = "ld.global.b64", "ld.global.v4", "griddepcontrol.", "st.global.v4"
    lines = (line.strip() for line in seen[-1].splitlines())
    order = [line.split()[0].rstrip(";") for line in lines if line.startswith(names)]
    before = ["ld.global.b64", "ld.global.v4.b32", "ld.global.v4.b32"]
    after = ["ld.global.v4.b32"] * 4 + ["st.global.v4.b32"] * 4
    launch, wait = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
    assert order == [launch, *before, wait, *after]


@pytest.mark.parametrize("m", [1, 4096])
@pytest.mark.parametrize("heads", [1, 2, 7, 40, 256])
@pytest.mark.parametrize("dims", [(64, 64), (128, 96), (256, 64), (MAX_HEAD_DIM, 16)], ids=str)
def test_choice(m: int, heads: int, dims: tuple[int, int]) -> None:
    """CTAs have a valid size, and few threads beyond the last head."""
    tile = choose_config(m, heads, *dims)
    assert 0 < tile.threads <= 256
    ctas = -(-heads // tile.heads)
    assert 0 <= ctas * tile.heads - heads < ctas * tile.steps


# --- compilation and errors -------------------------------------------------------------------


def test_opcheck() -> None:
    op = torch.ops.nvfp4.rotary_embedding.default
    check_op(op, CASES["partial, D = 64"].arguments())


def test_compiled() -> None:
    cache = CASES["ragged"].cache()

    def layer(positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_embedding(positions, q, k, cache)

    calls = [(Case(m, 3, 2).arguments()[:3], {}) for m in (5, 40, 128)]
    check_compiled(layer, calls, graphs=1)


POSITIONS = torch.tensor([3, 0])
Q, K = torch.zeros(2, 4, 64, dtype=BF16), torch.zeros(2, 2, 64, dtype=BF16)
CACHE = torch.zeros(8, 64, dtype=BF16)
GIVEN = {"positions": POSITIONS, "q": Q, "k": K, "cos_sin_cache": CACHE}
REFUSED: list[tuple[dict[str, Tensor], str]] = [
    ({"q": Q.float()}, "q: dtype is float32, must be bfloat16, float16; convert"),
    ({"q": Q[0]}, r"q: shape is \(4, 64\), must be \(M, Hq, D\); view it as heads"),
    ({"q": Q.mT}, r"q: strides are \(256, 1, 64\), the last must be 1; call contiguous"),
    ({"k": K.to(FP16)}, "k: dtype is float16, must be bfloat16; convert"),
    ({"k": K[0]}, r"k: shape is \(2, 64\), must be \(M, Hkv, D\); view it as heads"),
    ({"k": K[:1]}, r"k: shape is \(1, 2, 64\), must be \(2, 2, 64\); a row per row of q"),
    ({"k": K[..., :32]}, r"k: shape is \(2, 2, 32\), must be \(2, 2, 64\); .* as wide as q's"),
    ({"k": K.repeat(1, 1, 2)[..., ::2]}, "k: strides are .* the last must be 1; call contiguous"),
    ({"positions": POSITIONS.int()}, "positions: dtype is int32, must be int64; convert"),
    ({"positions": POSITIONS[:1]}, r"positions: shape is \(1,\), must be \(2,\); one position"),
    ({"positions": torch.arange(4)[::2]}, r"positions: strides are \(2,\).* call contiguous"),
    ({"positions": POSITIONS - 1}, "positions: holds -1, must be from 0 to 7, the rows of .* make"),
    ({"positions": POSITIONS + 5}, "positions: holds 8, must be from 0 to 7, the rows of cos_sin"),
    ({"cos_sin_cache": CACHE.float()}, "cos_sin_cache: dtype is float32, must be bfloat16"),
    ({"cos_sin_cache": CACHE[0]}, r"cos_sin_cache: shape is \(64,\), must be \(P, R\).* reshape"),
    ({"cos_sin_cache": CACHE.repeat(1, 2)}, "cos_sin_cache: R is 128, must be even and .* to 64"),
    ({"cos_sin_cache": CACHE[:, :7]}, "cos_sin_cache: R is 7, must be even and from 2 to 64, q's"),
    ({"cos_sin_cache": CACHE[:, :0]}, "cos_sin_cache: R is 0, must be even and from 2 to 64, q"),
    ({"cos_sin_cache": CACHE[:, :32]}, r"cos_sin_cache: strides are \(64, 1\).* call contiguous"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=[m[:30] for _, m in REFUSED])
def test_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        rotary_embedding(**GIVEN | changed)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BF16)


SM90_REFUSES: dict[str, tuple[Callable[[], dict[str, Tensor]], str]] = {
    "D ragged": (
        lambda: {"q": zeros(2, 4, 68), "k": zeros(2, 2, 68)},
        "q: D is 68, must be a multiple of 8 up to 1024 on sm_90; pad heads of q and k",
    ),
    "D large": (
        lambda: {"q": zeros(2, 1, 1032), "k": zeros(2, 1, 1032)},
        "q: D is 1032, must be a multiple of 8 up to 1024 on sm_90",
    ),
    "R": (
        lambda: {"cos_sin_cache": zeros(8, 40)},
        "cos_sin_cache: R is 40, must be a multiple of 16 on sm_90; use vLLM's own",
    ),
    "q starts late": (
        lambda: {"q": zeros(2, 4, 68)[..., 4:]},
        r"q: starts 8 bytes after a multiple of 16, must start at one; call \.clone",
    ),
    "k spaced oddly": (
        lambda: {"k": zeros(2, 2, 68)[..., :64]},
        r"k: stride 1 is 136 bytes, must be a multiple of 16 on sm_90; call \.contiguous",
    ),
    "cache starts late": (
        lambda: {"cos_sin_cache": zeros(8 * 64 + 1)[1:].view(8, 64)},
        r"cos_sin_cache: starts 2 bytes after a multiple of 16, must start at one; call \.clone",
    ),
}


@SM90
@ONE_SCHEDULE
@pytest.mark.parametrize("name", SM90_REFUSES)
def test_what_sm90_refuses(name: str, op_device: torch.device) -> None:
    make, message = SM90_REFUSES[name]
    with op_device:
        changed = make()
    given = {name: x.to(op_device) for name, x in GIVEN.items()}
    with pytest.raises(InvalidArgument, match=message):
        rotary_embedding(**given | changed)


def test_devices() -> None:
    init = rotary_op._rotary_embedding._init_fn
    with pytest.raises(InvalidArgument, match="k: is on meta, must be on cpu as q is; move it"):
        init(POSITIONS, Q, K.to("meta"), CACHE)
    with pytest.raises(NoKernelError, match="rotary_embedding: no float kernel for meta"):
        init(*(x.to("meta") for x in GIVEN.values()))
