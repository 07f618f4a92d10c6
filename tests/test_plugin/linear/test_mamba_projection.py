"""Input projections of Mamba mixers with a single group, which every rank copies.

For such mixers vLLM replaces the loaders of ``weight``, ``weight_scale`` and ``input_scale``.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.mamba import mamba_mixer2

from nvfp4_kernels.formats.nvfp4 import Convention, Nvfp4Tensor, quantize_weight
from tests.mixed_checkpoints import quantize
from tests.test_plugin.delegated.test_delegated import config_of
from tests.test_plugin.linear.test_linear_layers import (
    INPUT_SCALE,
    checkpoint,
    finish,
    load,
    tensors_on_disk,
)
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import Kind

HIDDEN, STATE, INNER, HEADS = 64, 16, 128, 8
ROWS = 2 * INNER + 2 * STATE + HEADS
FORMATS: tuple[Convention, ...] = ("modelopt", "compressed-tensors")


def rows_of(rank: int, ranks: int) -> list[int]:
    """Rows on disk that a rank holds: a share of z, x and dt, and all of B and C."""

    def part(start: int, size: int) -> list[int]:
        return list(range(start + rank * size // ranks, start + (rank + 1) * size // ranks))

    groups = list(range(2 * INNER, 2 * INNER + 2 * STATE))
    return [*part(0, INNER), *part(INNER, INNER), *groups, *part(2 * INNER + 2 * STATE, HEADS)]


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make this process one of two tensor-parallel ranks."""
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    for module in (mamba_mixer2, linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 2)
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: request.param)
    return int(request.param)


@pytest.fixture
def projection(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Nvfp4TcConfig], Any]:
    # Mixers register their names, each of which must be unique.
    monkeypatch.setattr(vllm_config.compilation_config, "static_forward_context", {})

    def built(config: Nvfp4TcConfig) -> Any:
        mixer = mamba_mixer2.MambaMixer2(
            hidden_size=HIDDEN,
            ssm_state_size=STATE,
            conv_kernel_size=4,
            intermediate_size=INNER,
            use_conv_bias=True,
            use_bias=False,
            n_groups=1,
            num_heads=HEADS,
            head_dim=INNER // HEADS,
            model_config=vllm_config.model_config,
            cache_config=vllm_config.cache_config,
            quant_config=config,
            prefix="m.mixer",
        )
        return mixer.in_proj

    return built


@pytest.fixture
def weight() -> Nvfp4Tensor:
    torch.manual_seed(0)
    return quantize_weight(torch.randn(ROWS, HIDDEN, dtype=torch.float32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
def test_ranks_hold_their_rows(
    format: Convention,
    weight_only: bool,
    weight: Nvfp4Tensor,
    rank: int,
    projection: Callable[[Nvfp4TcConfig], Any],
) -> None:
    quant = checkpoint(format, weight_only=weight_only)
    layer = projection(Nvfp4TcConfig(quant))
    load(layer, tensors_on_disk(weight, INPUT_SCALE, quant))
    finish(layer)
    values: Tensor = layer.quant_method.dequantize_weight(layer)
    torch.testing.assert_close(values, weight.dequantize()[rows_of(rank, 2)], rtol=2e-7, atol=0)


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_missing_is_named(
    format: Convention, weight: Nvfp4Tensor, projection: Callable[[Nvfp4TcConfig], Any]
) -> None:
    quant = checkpoint(format)
    layer = projection(Nvfp4TcConfig(quant))
    tensors = tensors_on_disk(weight, INPUT_SCALE, quant)
    del tensors[quant.names.weight]
    load(layer, tensors)
    with pytest.raises(UnsupportedCheckpoint, match=rf"in_proj\.{quant.names.weight}: not in the"):
        finish(layer)


@pytest.mark.usefixtures("rank")
def test_what_does_not_fit_is_named(
    weight: Nvfp4Tensor, projection: Callable[[Nvfp4TcConfig], Any]
) -> None:
    layer = projection(Nvfp4TcConfig(checkpoint()))
    with pytest.raises(UnsupportedCheckpoint, match=r"in_proj\.weight: dtype is bfloat16, must be"):
        load(layer, {"weight": torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)})
    with pytest.raises(UnsupportedCheckpoint, match=rf"shape is \({ROWS}, 1\), must be"):
        load(layer, {"weight_scale": weight.scales[:, :1]})


def test_quantised_at_load(rank: int, projection: Callable[[Nvfp4TcConfig], Any]) -> None:
    torch.manual_seed(0)
    values = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16)
    layer = projection(Nvfp4TcConfig())
    layer.tp_size = 1  # there is no other rank to take the largest value of
    load(layer, {"weight": values})
    finish(layer)
    expected = values[rows_of(rank, 2)].float()
    found: Tensor = layer.quant_method.dequantize_weight(layer)
    error = (found - expected).norm() / expected.norm()
    assert error < 0.12


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", [Kind.FP8, Kind.MXFP8])
def test_ranks_hold_their_rows_in_8_bits(
    kind: Kind, format: Convention, rank: int, projection: Callable[[Nvfp4TcConfig], Any]
) -> None:
    torch.manual_seed(0)
    layer = projection(config_of(format, kind))
    weight = quantize(kind, torch.randn(ROWS, HIDDEN), modelopt=format == "modelopt")
    tensors = dict(weight.tensors)
    if kind is Kind.FP8:
        tensors["input_scale"] = INPUT_SCALE if format == "modelopt" else INPUT_SCALE.view(1)
    load(layer, tensors)
    finish(layer)
    values: Tensor = layer.quant_method.dequantize_weight(layer)
    torch.testing.assert_close(values, weight.values[rows_of(rank, 2)], rtol=2e-7, atol=0)
