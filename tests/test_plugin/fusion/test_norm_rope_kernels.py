"""Norms and rotary embeddings of vLLM on the plugin's kernels: when used, and equal results."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import ir
from vllm.engine import arg_utils
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding, get_rope

import vllm_fp4_plugin
from nvfp4_kernels.devices import standing_in
from tests.sm90_product import sm90_ops
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.fusion import (
    add_rms_norm,
    norm_kernel,
    norm_module,
    norm_provider,
    norm_quantize,
    rotary,
)
from vllm_fp4_plugin.fusion.norm_module import NormOnOurKernel
from vllm_fp4_plugin.fusion.norm_quantize import QuantizingNorm
from vllm_fp4_plugin.fusion.rotary import RotaryOnOurKernel

HIDDEN, HEAD_DIM = 64, 32
NORM = "nvfp4_add_rms_norm/AddRmsNormSm90 (sm_90)"
ROTARY = "nvfp4_rotary_embedding/RotaryEmbeddingSm90 (sm_90)"
OFF = "switched off (norm_rope_kernels)"


@pytest.fixture
def priority(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Priority list of norm providers in the engine's config, as a user leaves it."""
    vllm_fp4_plugin.register()
    config = vllm_config.kernel_config.ir_op_priority
    config.fused_add_rms_norm = ["native"]
    platform = norm_provider.current_platform
    given = type(config).with_default(["native"])
    monkeypatch.setattr(type(platform), "get_default_ir_op_priority", lambda *_: given)
    with ir.ops.fused_add_rms_norm.set_priority(["native"]):
        yield config.fused_add_rms_norm


@pytest.fixture
def engine(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvfp4TcConfig]:
    """Config of an engine with the plugin's method that is being built, as on a Hopper."""
    quant = Nvfp4TcConfig()
    monkeypatch.setattr(vllm_config, "quant_config", quant)
    with sm90_ops():
        yield quant


# --- norms ------------------------------------------------------------------------------------


def test_ours_comes_first_on_hopper(vllm_config: Any, priority: list[str]) -> None:
    with sm90_ops():
        record = add_rms_norm.make_default(vllm_config, switched_on=True)
        assert record is not None
        assert (record.name, record.kernel, record.reason) == ("fused_add_rms_norm", NORM, "")
        assert priority == ["nvfp4_tc", "native"]
        assert ir.ops.fused_add_rms_norm.get_priority() == ["nvfp4_tc", "native"]


def test_an_all_reduce_may_take_the_norm(
    vllm_config: Any, priority: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = vllm_config.compilation_config.pass_config
    monkeypatch.setattr(passes, "fuse_allreduce_rms", True)
    with sm90_ops():
        record = add_rms_norm.make_default(vllm_config, switched_on=True)
    assert record is not None
    assert (record.kernel, record.reason) == (
        NORM,
        "where vLLM does not fuse it with an all-reduce",
    )


def test_switched_off(vllm_config: Any, priority: list[str]) -> None:
    with sm90_ops():
        record = add_rms_norm.make_default(vllm_config, switched_on=False)
    assert record is not None
    assert (record.kernel, record.reason) == ("native (vLLM)", OFF)
    assert priority == ir.ops.fused_add_rms_norm.get_priority() == ["native"]


def test_ours_named_by_the_user_although_switched_off(
    vllm_config: Any, priority: list[str]
) -> None:
    priority[:] = ["nvfp4_tc", "native"]
    with sm90_ops():
        record = add_rms_norm.make_default(vllm_config, switched_on=False)
    assert record is not None
    assert record.kernel == NORM
    assert record.reason == "--ir-op-priority.fused_add_rms_norm=nvfp4_tc,native"


def test_the_users_choice_stands(vllm_config: Any, priority: list[str]) -> None:
    priority[:] = ["vllm_c", "native"]
    with sm90_ops():
        record = add_rms_norm.make_default(vllm_config, switched_on=True)
    assert record is not None
    assert record.kernel == "vllm_c (vLLM)"
    assert record.reason == "--ir-op-priority.fused_add_rms_norm=vllm_c,native"
    assert priority == ["vllm_c", "native"]


@pytest.mark.parametrize("arch", ["cpu", "sm_100"])
def test_elsewhere_vllm_is_left_alone(vllm_config: Any, priority: list[str], arch: str) -> None:
    with standing_in("cpu", arch):
        assert add_rms_norm.make_default(vllm_config, switched_on=True) is None
        assert rotary.make_default(switched_on=True) is None
    assert priority == ["native"]


def test_a_norm_of_vllm_runs_on_our_op(
    vllm_config: Any, priority: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = RMSNorm(HIDDEN, dtype=torch.bfloat16)
    layer.weight.data.normal_(1, 0.1)
    x, residual = (torch.randn(5, HIDDEN).bfloat16() for _ in range(2))
    expected = layer(x.clone(), residual.clone())
    calls: list[int] = []

    def ours(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        calls.append(len(x))
        return exact(x, *rest)

    exact = norm_provider.add_rms_norm
    monkeypatch.setattr(norm_provider, "add_rms_norm", ours)
    with sm90_ops():
        add_rms_norm.make_default(vllm_config, switched_on=True)
        found = layer(x.clone(), residual.clone())
        layer(x.clone())  # without a residual there is no op of ours
    assert calls == [5]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.usefixtures("priority")
def test_our_default_is_no_option_of_the_user(
    bf16_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed default must not count as the user's option, or vLLM 0.33 warns of deprecation."""
    said: list[str] = []
    monkeypatch.setattr(arg_utils.logger, "warning_once", lambda line, *_: said.append(line))
    args = arg_utils.EngineArgs(
        model=str(bf16_checkpoint), quantization="nvfp4-tc", enforce_eager=True
    )
    for _ in range(2):
        config = args.create_engine_config()
        with sm90_ops():
            add_rms_norm.make_default(config, switched_on=True)
        assert config.kernel_config.ir_op_priority.fused_add_rms_norm == ["nvfp4_tc", "native"]
    assert not [line for line in said if "ir_op_priority" in line]


X, WEIGHT = torch.zeros(2, HIDDEN, dtype=torch.bfloat16), torch.zeros(HIDDEN, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"x": X.half(), "x_residual": X.half(), "weight": WEIGHT.half()}, True),
        ({"x": X.float(), "x_residual": X.float(), "weight": WEIGHT.float()}, False),
        ({"weight": None}, False),
        ({"weight": WEIGHT.float()}, False),
        ({"x_residual": X.half()}, False),
        ({"variance_size": 32}, False),
        ({"x": X[None]}, False),
        ({"x": X[:, :60], "x_residual": X[:, :60]}, False),
        ({"x": X.new_zeros(2, 68)[:, :64]}, False),
        ({"x_residual": X.T.contiguous().T}, False),
        ({"x": X.new_zeros(1, 32768), "x_residual": X.new_zeros(1, 32768)}, False),
    ],
    ids=[
        "bf16", "fp16", "fp32", "no weight", "fp32 weight", "fp16 residual", "part of the row",
        "3-D", "K = 60", "rows 136 bytes apart", "columns", "long",
    ],
)  # fmt: skip
def test_what_the_kernel_takes(changed: dict[str, Any], taken: bool) -> None:
    given = {"x": X, "x_residual": X, "weight": WEIGHT, "epsilon": 1e-5} | changed
    assert norm_kernel.takes(**given) is taken


def test_registered_once() -> None:
    vllm_fp4_plugin.register()
    vllm_fp4_plugin.register()
    assert "nvfp4_tc" in ir.ops.fused_add_rms_norm.supported_providers()


# --- norms of a vLLM without an IR --------------------------------------------------------------


@pytest.fixture
def no_ir(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Emulate vLLM after 0.33: neither the IR's op nor the option for it exists."""
    monkeypatch.setattr(norm_kernel, "has_ir", lambda: False)
    monkeypatch.setattr(vllm_config, "kernel_config", None)
    monkeypatch.delattr("vllm.platforms.interface.Platform.get_default_ir_op_priority")
    monkeypatch.setattr(norm_provider, "_op", None)
    before = dict(op_registry_oot)
    op_registry_oot.pop("RMSNorm", None)
    yield
    op_registry_oot.clear()
    op_registry_oot.update(before)


def norm_of_model() -> Any:
    layer = RMSNorm(HIDDEN, dtype=torch.bfloat16)
    layer.weight.data.normal_(1, 0.1)
    return layer


@pytest.mark.usefixtures("no_ir")
def test_a_norm_runs_on_our_op_without_an_ir(
    vllm_config: Any, engine: Nvfp4TcConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = add_rms_norm.make_default(vllm_config, switched_on=True)
    assert record is not None
    assert (record.name, record.kernel, record.reason) == ("fused_add_rms_norm", NORM, "")
    calls: list[int] = []

    def ours(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        calls.append(len(x))
        return exact(x, *rest)

    exact = norm_module.add_rms_norm
    monkeypatch.setattr(norm_module, "add_rms_norm", ours)
    layer = norm_of_model()
    assert type(layer) is NormOnOurKernel
    assert layer.name == "rms_norm"
    x, residual = (torch.randn(5, HIDDEN).bfloat16() for _ in range(2))
    given = x.clone(), residual.clone()
    for mine, theirs in zip(layer(*given), layer.forward_native(x, residual), strict=True):
        assert torch.equal(mine, theirs)
    assert calls == [5]
    layer(x)  # no residual
    layer(x[None], residual[None])  # 3-D
    assert calls == [5]


@pytest.mark.usefixtures("no_ir")
def test_a_norm_is_traced_without_an_ir(vllm_config: Any, engine: Nvfp4TcConfig) -> None:
    add_rms_norm.make_default(vllm_config, switched_on=True)
    graphs: list[str] = []

    def keep(module: Any, _: Any) -> Any:
        graphs.append(module.code)
        return module

    x, residual = (torch.randn(5, HIDDEN).bfloat16() for _ in range(2))
    layer = norm_of_model()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=keep)
    for mine, theirs in zip(compiled(x, residual), layer(x, residual), strict=True):
        assert torch.equal(mine, theirs)
    [graph] = graphs
    assert "nvfp4.add_rms_norm" in graph


@pytest.mark.usefixtures("no_ir")
@pytest.mark.parametrize(
    ("which", "reason"),
    [
        ("switched off", OFF),
        ("fuse_allreduce_rms", "vLLM fuses it with an all-reduce"),
        ("another plugin", "another plugin replaces RMSNorm"),
    ],
)
def test_norms_that_stay_vllms_without_an_ir(
    vllm_config: Any,
    engine: Nvfp4TcConfig,
    monkeypatch: pytest.MonkeyPatch,
    which: str,
    reason: str,
) -> None:
    class Theirs(RMSNorm):
        pass

    passes = vllm_config.compilation_config.pass_config
    if which == "switched off":
        vllm_config.additional_config = {"nvfp4_tc": {"norm_rope_kernels": False}}
    elif which == "another plugin":
        RMSNorm.register_oot(Theirs)
    else:
        monkeypatch.setattr(passes, which, True)
    record = add_rms_norm.make_default(vllm_config, switched_on=which != "switched off")
    assert record is not None
    assert (record.kernel, record.reason) == ("vLLM", reason)
    layer = norm_of_model()
    assert not getattr(layer, "ours", False)
    assert (type(layer) is Theirs) == (which == "another plugin")


@pytest.mark.usefixtures("no_ir")
def test_other_engines_keep_vllms_norms(
    vllm_config: Any, engine: Nvfp4TcConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines without the method, and batch-invariant engines, keep vLLM's norms."""
    add_rms_norm.make_default(vllm_config, switched_on=True)
    assert norm_of_model().ours
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        assert not norm_of_model().ours
    vllm_config.quant_config = None
    assert not norm_of_model().ours


@pytest.mark.usefixtures("no_ir")
def test_norms_that_quantise_come_before(vllm_config: Any, engine: Nvfp4TcConfig) -> None:
    """Quantising norms take precedence, whichever class was registered first."""
    add_rms_norm.make_default(vllm_config, switched_on=True)
    assert op_registry_oot["RMSNorm"] is NormOnOurKernel
    norm_quantize.enable()
    for _ in range(2):
        assert op_registry_oot["RMSNorm"] is QuantizingNorm
        assert norm_quantize.unsupported_reason(vllm_config, switched_on=True) is None
        add_rms_norm.make_default(vllm_config, switched_on=True)
    assert norm_of_model().ours


def test_an_ir_leaves_our_class_to_it(vllm_config: Any, engine: Nvfp4TcConfig) -> None:
    assert norm_kernel.has_ir()
    assert not NormOnOurKernel(HIDDEN).ours


# --- rotary embeddings ------------------------------------------------------------------------

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "Llama 3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "YaRN": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "half": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip


def rope_of(parameters: dict[str, Any], **options: Any) -> Any:
    return get_rope(HEAD_DIM, 128, rope_parameters=parameters, dtype=torch.bfloat16, **options)


def turned(rope: Any) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Queries and keys as slices of a projection, and the same after rotation."""
    qkv = torch.randn(5, 8 * HEAD_DIM).bfloat16()
    q, k, _ = qkv.split([4 * HEAD_DIM, 2 * HEAD_DIM, 2 * HEAD_DIM], 1)
    return q, k, rope(torch.tensor([0, 1, 5, 77, 127]), q.clone(), k.clone())


@pytest.mark.parametrize("parameters", ROPES.values(), ids=ROPES)
def test_a_rotary_embedding_of_vllm_runs_on_our_op(
    engine: Nvfp4TcConfig, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any]
) -> None:
    assert rotary.make_default(switched_on=True) is None
    rope = rope_of(parameters)
    assert rope.ours
    [record] = engine.startup.report.layers
    assert (record.name, record.kernel, record.reason) == ("rotary_emb", ROTARY, "")
    calls: list[int] = []

    def ours(positions: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(positions))
        return exact(positions, *rest)

    exact = rotary.rotary_embedding
    monkeypatch.setattr(rotary, "rotary_embedding", ours)
    q, k, found = turned(rope)
    assert calls == [5]
    expected = rope.forward_native(torch.tensor([0, 1, 5, 77, 127]), q, k)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        # vLLM rounds both products and their sum to bfloat16 here, each by half a unit of 2⁻⁸.
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=3 * 2**-9 * 5)


def test_what_stays_with_vllm(engine: Nvfp4TcConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings of neighbouring pairs, of queries alone, and of another dtype stay with vLLM."""
    rotary.make_default(switched_on=True)
    neighbours, rope = rope_of(ROPES["default"], is_neox_style=False), rope_of(ROPES["default"])
    monkeypatch.setattr(rotary, "rotary_embedding", None)  # not called
    assert not neighbours.ours
    turned(neighbours)
    positions, q = torch.arange(3), torch.randn(3, 64).bfloat16()
    rope(positions, q, None)
    rope(positions, q.float(), q.float())


@pytest.mark.parametrize(
    ("head_size", "options", "reason"),
    [
        (HEAD_DIM, {"is_neox_style": False}, "it turns neighbouring elements together"),
        (HEAD_DIM, {"dtype": torch.float32}, "its dtype is float32"),
        (24, {}, "it turns 24 elements of heads of 24"),
    ],
    ids=["neighbours", "fp32", "heads of 24"],
)
def test_the_report_says_why_not(
    engine: Nvfp4TcConfig, head_size: int, options: dict[str, Any], reason: str
) -> None:
    rotary.make_default(switched_on=True)
    given = {"dtype": torch.bfloat16} | options
    rope = get_rope(head_size, 128, rope_parameters=ROPES["default"], **given)
    assert not rope.ours
    [record] = engine.startup.report.layers
    assert (record.name, record.kernel, record.reason) == ("rotary_emb", "vLLM", reason)


def test_other_engines_keep_vllms(vllm_config: Any, engine: Nvfp4TcConfig) -> None:
    """Registered classes serve engines without the plugin's method too, on vLLM's ops."""
    rotary.make_default(switched_on=True)
    vllm_config.quant_config = None
    rope = rope_of(ROPES["default"])
    assert isinstance(rope, RotaryOnOurKernel)
    assert not rope.ours
    assert not engine.startup.report.layers


def test_an_engine_does_not_inherit_a_choice(vllm_config: Any, engine: Nvfp4TcConfig) -> None:
    """Rotary embeddings are cached for the life of the process: a new engine chooses again."""
    rotary.make_default(switched_on=True)
    assert rope_of(ROPES["default"]).ours
    vllm_config.additional_config = {"nvfp4_tc": {"norm_rope_kernels": False}}
    record = rotary.make_default(switched_on=False)
    assert record is not None
    assert (record.kernel, record.reason) == ("vLLM", OFF)
    assert not rope_of(ROPES["default"]).ours


def test_every_replaced_class_turns_as_the_first() -> None:
    """Replaced classes inherit the first class's rotation, which the plugin's op implements."""
    for each in rotary.REPLACED:
        assert each.forward_native is RotaryEmbedding.forward_native
        assert each.forward_cuda is RotaryEmbedding.forward_cuda
