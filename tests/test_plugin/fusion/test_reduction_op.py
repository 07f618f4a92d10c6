"""Op that all-reduces, normalises and quantises, compared with its parts and with FlashInfer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import Static, add_rms_norm_quantize, gemm
from nvfp4_kernels.formats.nvfp4 import quantize_weight
from nvfp4_kernels.runtime import launch_cache
from nvfp4_kernels.runtime.replay import Launch
from tests import devices, fake_flashinfer
from tests.emulator import randomised
from tests.test_kernels.compilation import check_op
from vllm_fp4_plugin.ops import all_reduce, flashinfer_all_reduce
from vllm_fp4_plugin.ops.all_reduce import all_reduce_add_rms_norm_quantize
from vllm_fp4_plugin.ops.operands import Unreduced

K, TOKENS, EPS = 128, 5, 1e-6
SCALE = torch.tensor(0.003)
KERNEL = "nvfp4_kernels.quantize.rms_norm.reference:rms_norm_quantize"
MANY = 1000

pytestmark = pytest.mark.usefixtures("vllm_config")

Given = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture
def given() -> Given:
    """Partial sums of this rank and of the other rank, residual and weight."""
    torch.manual_seed(3)
    mine, other, residual = (torch.randn(TOKENS, K).bfloat16() for _ in range(3))
    return mine, other, residual, (1 + torch.randn(K) / 4).bfloat16()


@pytest.fixture(params=[0, MANY], ids=["apart", "flashinfer"])
def tokens(request: pytest.FixtureRequest, given: Given, monkeypatch: pytest.MonkeyPatch) -> int:
    """Maximum number of tokens for FlashInfer's op, with two ranks, one of which is simulated."""

    def add_up(x: Tensor) -> Tensor:
        assert torch.equal(x, given[0])
        return x + given[1]

    monkeypatch.setattr(all_reduce, "tensor_model_parallel_all_reduce", add_up)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    fake_flashinfer.install(monkeypatch, add_up, MANY)
    return int(request.param)


def run(
    given: Given, tokens: int, reciprocal: Tensor | None = None, kernel: str = KERNEL
) -> tuple[Tensor, ...]:
    """Quantised data, block scales, and the new residual."""
    mine, _, residual, weight = given
    partial = mine.clone()
    reciprocal = SCALE.reciprocal() if reciprocal is None else reciprocal
    data, scales = all_reduce_add_rms_norm_quantize(
        partial, residual, weight, EPS, SCALE, reciprocal, 1, kernel, tokens, K
    )
    return data, scales, partial


def expected(given: Given) -> tuple[Tensor, ...]:
    mine, other, residual, weight = given
    return add_rms_norm_quantize(mine + other, residual, weight, EPS, Static(SCALE))


def product(data: Tensor, scales: Tensor) -> Tensor:
    """Product of the quantised rows, which ignores the scales of padding."""
    torch.manual_seed(4)
    weight = quantize_weight(torch.randn(48, K))
    blocked = torch.zeros(1, K // 64, 32, 16).to(torch.float8_e4m3fn)
    blocked.view(-1)[fake_flashinfer._swizzled(48, K // 16)] = weight.scales
    alpha = (SCALE * weight.global_scale).reshape(1)
    return gemm(data, scales, weight.data, blocked, alpha, [48])


def test_a_norm_is_prepared(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated launch reads new addresses and gives the result of a checked call."""
    devices.cutlass_or_skip()
    repeated: list[Launch] = []
    start = Launch.start

    def note(launch: Launch, *rest: Any) -> None:
        repeated.append(launch)
        start(launch, *rest)

    monkeypatch.setattr(Launch, "start", note)
    monkeypatch.setattr(all_reduce, "tensor_model_parallel_all_reduce", torch.clone)
    kernel = KERNEL.replace(".reference:", ".sm100:")
    others = tuple(x + 1 for x in given)
    with devices.emulated_ops(randomised(1)):
        with launch_cache.suspended(False):
            first, second = run(given, 0, kernel=kernel), run(others, 0, kernel=kernel)
        assert len(repeated) == 1
        for found, parts in ((first, given), (second, others)):
            for a, b in zip(found, run(parts, 0, kernel=kernel), strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert len(repeated) == 1


def test_it_is_what_its_parts_are(given: Given, tokens: int) -> None:
    found, wanted = run(given, tokens), expected(given)
    for name, a, b in zip(("data", "residual"), found[::2], wanted[::2], strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(product(*found[:2]), product(*wanted[:2]))
    assert torch.isfinite(product(*found[:2])).all()


def zero(given: Given) -> Given:
    mine, other, residual, weight = given
    return mine, other, torch.zeros_like(residual), weight


MUTANTS: dict[str, tuple[Callable[[Tensor, Given], Tensor], bool, Tensor | None]] = {
    "not added up": (lambda x, _: x, False, None),
    "added up twice": (lambda x, g: x + g[1] + g[1], False, None),
    "no residual": (lambda x, g: x + g[1], True, None),
    "no reciprocal": (lambda x, g: x + g[1], False, SCALE),
}


@pytest.mark.parametrize("tokens", [0], indirect=True)
@pytest.mark.parametrize("how", [0, MANY], ids=["apart", "flashinfer"])
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(
    name: str, how: int, given: Given, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_up, forgets, reciprocal = MUTANTS[name]

    def added(x: Tensor) -> Tensor:
        return add_up(x, given)

    monkeypatch.setattr(all_reduce, "tensor_model_parallel_all_reduce", added)
    fake_flashinfer.install(monkeypatch, added, MANY)
    found = run(zero(given) if forgets else given, how, reciprocal)
    wanted = expected(given)
    # The plugin's kernel takes the factor itself.
    same = name == "no reciprocal" and not how
    assert torch.equal(product(*found[:2]), product(*wanted[:2])) == same
    assert torch.equal(found[2], wanted[2]) == (name == "no reciprocal")


def test_opcheck(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "tensor_model_parallel_all_reduce", lambda x: x + given[1])
    mine, _, residual, weight = given
    arguments = mine.clone(), residual, weight, EPS, SCALE, SCALE.reciprocal(), 1, KERNEL, 0, K
    check_op(all_reduce_add_rms_norm_quantize, arguments)


@pytest.mark.processes
def test_compiled_is_the_same(given: Given, tokens: int) -> None:
    """The compiled graph reads the new residual after the op overwrites its argument."""

    def layer(mine: Tensor) -> tuple[Tensor, ...]:
        partial = mine * 1.0
        data, scales = all_reduce_add_rms_norm_quantize(
            partial, given[2], given[3], EPS, SCALE, SCALE.reciprocal(), 1, KERNEL, tokens, K
        )
        return data, scales.view(torch.uint8), partial + 1

    compiled = torch.compile(layer, fullgraph=True)
    for found, wanted in zip(compiled(given[0]), layer(given[0]), strict=True):
        assert torch.equal(found, wanted)


# --- flashinfer's, by the number of tokens ------------------------------------------------------


def test_how_vllms_wrapper_is_called(
    given: Given, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = fake_flashinfer.install(monkeypatch, lambda x: x + given[1], MANY)
    run(given, tokens)
    assert len(comm.calls) == (tokens > 0)
    for call in comm.calls:
        assert torch.equal(call["scale_factor"], SCALE.reciprocal())
        assert call["residual_in"] is given[2]
        assert call["residual_out"] is call["input"]
        assert call["rms_gamma"] is given[3]
        assert call["rms_eps"] == EPS
        assert call["launch_with_pdl"]
        assert call["fp32_acc"]


@pytest.mark.parametrize(
    ("served", "limit", "calls"),
    [
        (TOKENS, MANY, 1),
        (TOKENS - 1, MANY, 0),
        (MANY, TOKENS, 1),
        (MANY, TOKENS - 1, 0),
        (None, MANY, 0),
    ],
)
def test_how_many_tokens_it_takes(
    served: int | None, limit: int, calls: int, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches beyond the workspace or the limit take a separate all-reduce."""
    mine, other, residual, weight = given

    def add_up(x: Tensor) -> Tensor:
        return x + other[: len(x)]

    monkeypatch.setattr(all_reduce, "tensor_model_parallel_all_reduce", add_up)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    comm = fake_flashinfer.install(monkeypatch, add_up, served)
    for found, wanted in zip(run(given, limit)[::2], expected(given)[::2], strict=True):
        assert torch.equal(found, wanted)
    assert len(comm.calls) == calls
    run((mine[:2], other, residual[:2], weight), limit)
    assert len(comm.calls) == calls + (served is not None)


def test_a_workspace_is_made_once_and_by_all(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with too many tokens allocates the workspace too, which all ranks must have."""
    said: list[str] = []
    monkeypatch.setattr(
        flashinfer_all_reduce.logger, "warning", lambda text, *numbers: said.append(text % numbers)
    )
    monkeypatch.setattr(all_reduce, "tensor_model_parallel_all_reduce", lambda x: x + given[1])
    agreed: list[int] = []

    def the_others_have_none(served: Tensor, *_: Any, **__: Any) -> None:
        agreed.append(int(served))
        served.fill_(0)

    monkeypatch.setattr(torch.distributed, "all_reduce", the_others_have_none)
    comm = fake_flashinfer.install(monkeypatch, lambda x: x + given[1], MANY)
    run(given, TOKENS - 1)
    run(given, TOKENS)
    assert agreed == [TOKENS - 1]
    assert comm.calls == []
    assert said == [
        f"nvfp4-tc: flashinfer's workspace serves 0 tokens, not {TOKENS - 1}; above that "
        "all-reduce and norm run apart"
    ]


# --- partial sums and their readers -------------------------------------------------------------


def test_other_readers_are_told() -> None:
    tensor = torch.ones(2, K)
    part = Unreduced(tensor, "model.layers.0.mlp.down_proj")
    assert (part.shape, part.dtype) == ((2, K), tensor.dtype)
    told = r"^model\.layers\.0\.mlp\.down_proj: its result was to be added up .* by the norm after"
    readers: list[Callable[[], Any]] = [
        lambda: part.contiguous(),  # type: ignore[operator]
        lambda: part + tensor,  # type: ignore[operator]
        lambda: tensor + part,  # type: ignore[operator]
        lambda: tensor * part,  # type: ignore[operator]
        lambda: part[0],  # type: ignore[index]
    ]
    for reader in readers:
        with pytest.raises((AttributeError, TypeError), match=told) as raised:
            reader()
        assert '{"nvfp4_tc": {"fuse_norm": false}}' in str(raised.value)
