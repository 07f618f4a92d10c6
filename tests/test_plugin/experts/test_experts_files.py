"""Checkpoints with quantised experts: kinds, serving methods, and refusals by ``verify``."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nvfp4_kernels.devices import standing_in
from tests import moe_checkpoints
from tests.catalogue.checkpoint import write
from tests.catalogue.facts import named
from tests.moe_checkpoints import change
from tests.test_plugin.checkpoint.test_layer_kinds import (
    CHANNEL,
    CT_NVFP4,
    FP8,
    NVFP4,
    NVFP4_A16,
    PLAIN,
    SILENT,
    UNIFORM,
    headers,
)
from vllm_fp4_plugin.checkpoint.layer_kinds import LayerKind, LayerKinds
from vllm_fp4_plugin.commands.verification import verified
from vllm_fp4_plugin.engine import meta_model
from vllm_fp4_plugin.formats import UnsupportedCheckpoint, parse
from vllm_fp4_plugin.formats.kind import Kind

EXPERTS = "model.layers.0.mlp.experts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ALL = [f"{EXPERTS}.{e}.{name}" for e in range(2) for name in PROJECTIONS]


# --- kinds ----------------------------------------------------------------------------------------


def kind_of(
    config: dict[str, Any], modules: dict[str, Any] | None = None, prefix: str = EXPERTS
) -> LayerKind:
    kinds = LayerKinds(parse(config))
    if modules is not None:
        kinds.read(headers(modules))
    return kinds.of_experts(prefix, 2, PROJECTIONS)


@pytest.mark.parametrize(
    ("config", "shapes", "kind"),
    [
        (UNIFORM, NVFP4, Kind.NVFP4),
        (SILENT, NVFP4_A16, Kind.NVFP4_A16),
        (SILENT, FP8, Kind.FP8),
        (SILENT, PLAIN, Kind.UNQUANTIZED),
    ],
    ids=["NVFP4", "weight-only", "FP8", "16-bit"],
)
def test_kind_by_tensors(config: dict[str, Any], shapes: Any, kind: Kind) -> None:
    group, reason = kind_of(config, dict.fromkeys(ALL, shapes))
    assert (group.kind, reason) == (kind, "")


def test_experts_that_differ() -> None:
    modules = dict.fromkeys(ALL, NVFP4) | {f"{EXPERTS}.1.up_proj": FP8}
    message = r"1\.up_proj: is FP8 per-tensor, but .*experts\.0\.gate_proj of the same layer is NVF"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        kind_of(SILENT, modules)


def test_layers_may_differ() -> None:
    other = [name.replace("layers.0", "layers.1") for name in ALL]
    modules = dict.fromkeys(ALL, NVFP4) | dict.fromkeys(other, CHANNEL)
    second = EXPERTS.replace("layers.0", "layers.1")
    assert kind_of(SILENT, modules).group.kind is Kind.NVFP4
    assert kind_of(SILENT, modules, second).group.kind is Kind.FP8_CHANNEL


def test_a_module_that_vllm_calls_otherwise() -> None:
    """The module name is MiniMax-M2's; modules of other layers or of a draft model do not count."""
    names = [name.replace("mlp", "block_sparse_moe") for name in ALL]
    modules = dict.fromkeys(names, NVFP4_A16)
    modules |= {name.replace("layers.0", "layers.1"): FP8 for name in names}
    modules |= {name.replace("model.", "mtp."): FP8 for name in names}
    assert kind_of(SILENT, modules).group.kind is Kind.NVFP4_A16


def test_more_experts_than_the_model_has() -> None:
    modules = dict.fromkeys([*ALL, f"{EXPERTS}.2.up_proj"], NVFP4)
    with pytest.raises(UnsupportedCheckpoint, match=f"{EXPERTS}: has 3 experts .* must have 2"):
        kind_of(UNIFORM, modules)


def mixed(names: Iterable[str], **more: str) -> dict[str, Any]:
    layers = dict.fromkeys(names, "NVFP4") | more
    return SILENT | {"quantized_layers": {n: {"quant_algo": a} for n, a in layers.items()}}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (UNIFORM, Kind.NVFP4),
        (UNIFORM | {"ignore": [EXPERTS]}, Kind.UNQUANTIZED),
        (UNIFORM | {"ignore": ["*mlp.experts*"]}, Kind.UNQUANTIZED),
        (UNIFORM | {"ignore": ALL}, Kind.UNQUANTIZED),
        (mixed(ALL), Kind.NVFP4),
        (mixed([EXPERTS]), Kind.NVFP4),
        (mixed(["model.layers.0.self_attn.o_proj"]), Kind.UNQUANTIZED),
    ],
    ids=["every linear", "ignored", "by a wildcard", "each ignored", "each", "whole", "not listed"],
)
def test_kind_by_the_config_alone(config: dict[str, Any], kind: Kind) -> None:
    assert kind_of(config).group.kind is kind


def test_compressed_tensors_regex() -> None:
    fp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    group = {
        "targets": [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"],
        "weights": fp4,
        "input_activations": fp4,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
    }
    assert kind_of(config).group.kind is Kind.NVFP4
    assert kind_of(config, dict.fromkeys(ALL, CT_NVFP4)).group.kind is Kind.NVFP4


@pytest.mark.parametrize(
    "config",
    [UNIFORM | {"ignore": ALL[3:4]}, mixed(ALL[:3] + ALL[4:], **{ALL[3]: "FP8"})],
    ids=["one ignored", "one of another kind"],
)
def test_a_config_in_which_experts_differ(config: dict[str, Any]) -> None:
    message = f"{EXPERTS}: 0.gate_proj is NVFP4, 1.gate_proj is (16-bit|FP8 per-tensor); experts"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        kind_of(config)


# --- verify: without reading a weight -------------------------------------------------------------


Written = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(model: str = "qwen3", kind: Kind = Kind.NVFP4, **settings: Any) -> Path:
        config = getattr(moe_checkpoints, model)()
        return moe_checkpoints.write(tmp_path, config, {"experts": kind}, **settings).path

    return write


def without(prefix: str) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return edit


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let vLLM choose its methods as if the kernel for Hopper could run."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as compressed_tensors,
    )

    for module in (modelopt, compressed_tensors):
        chosen = (NvFp4MoeBackend.MARLIN, MarlinExperts)
        monkeypatch.setattr(module, "select_nvfp4_moe_backend", lambda chosen=chosen, **_: chosen)
    with standing_in("cpu", "sm_90"):
        yield


@pytest.mark.parametrize("server", ["reference", "vllm"])
@pytest.mark.parametrize(
    ("model", "missing"),
    [
        ("qwen3", "model.layers.1.mlp.experts.3.up_proj"),
        ("glm4", "model.layers.1.mlp.experts.0.down_proj"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.2.w3"),
        ("minimax", "model.layers.0.block_sparse_moe.experts.2.w1"),
        ("deepseek", "model.layers.1.mlp.experts.7.gate_proj"),
        ("qwen3_next", "model.layers.1.mlp.experts.0.up_proj"),
    ],
)
def test_a_missing_projection_is_named(
    server: str, model: str, missing: str, written: Written, request: pytest.FixtureRequest
) -> None:
    if server == "vllm":
        request.getfixturevalue("as_on_a_gpu")
    elif model == "minimax":
        pytest.skip("vLLM's router on CPU does not route it")
    checkpoint = written(model, Kind.NVFP4_A16)
    assert "complete" in verified(checkpoint).lines()[0]
    change(checkpoint, without(missing))
    if model == "minimax":
        missing = missing.replace("block_sparse_moe", "mlp")  # as vLLM calls it
    with pytest.raises(UnsupportedCheckpoint, match=rf"holds no {missing}\.weight, {missing}\.wei"):
        verified(checkpoint)


def test_a_missing_scale_is_named(written: Written) -> None:
    checkpoint = written()
    name = "model.layers.0.mlp.experts.7.gate_proj.input_scale"
    change(checkpoint, without(name))
    with pytest.raises(ValueError, match=rf"{name}: is missing beside"):
        verified(checkpoint)


def test_a_router_that_a_cpu_lacks_does_not_matter(written: Written) -> None:
    """The files are judged, not whether this machine could serve them."""
    assert "complete" in verified(written("minimax")).lines()[0]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_packed_experts(tmp_path: Path) -> None:
    """Step 3.7 stores the gates of all experts in one tensor, which vLLM's model splits."""
    path = write(named("Step 3.7 Flash (experts, vision)"), tmp_path)
    assert "complete" in verified(path, trust_remote_code=True).lines()[0]
    change(path, without("model.layers.1.moe.up_proj."))
    name = r"model\.layers\.1\.moe\.experts\.0\.up_proj\.weight"
    with pytest.raises(UnsupportedCheckpoint, match=rf"holds no {name}, .* and 12 more"):
        verified(path, trust_remote_code=True)


def test_a_dense_model_was_there_before(written: Written, base_config: Any) -> None:
    """Process groups left by a dense model include none for experts."""
    del base_config
    assert "complete" in verified(written()).lines()[0]


# --- who serves them ------------------------------------------------------------------------------


def experts_rows(checkpoint: Path, **options: Any) -> list[str]:
    given = {"nvfp4_tc": options}
    with meta_model.built(str(checkpoint), additional_config=given) as (_, config):
        lines = config.quant_config.startup.report.lines()
    return [line for line in lines if line.startswith("experts")]


@pytest.mark.parametrize(
    ("kind", "modelopt", "row"),
    [
        (
            Kind.NVFP4,
            True,
            "(vLLM: ModelOptNvFp4FusedMoE MARLIN), W4A16, MARLIN leaves activations in 16 bits",
        ),
        (Kind.NVFP4_A16, True, "(vLLM: ModelOptNvFp4FusedMoE MARLIN), W4A16"),
        (
            Kind.NVFP4_A16,
            False,
            "(vLLM: CompressedTensorsW4A4Nvfp4MoEMethod MARLIN), W4A16",
        ),
    ],
)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_vllms_methods_are_named(kind: Kind, modelopt: bool, row: str, written: Written) -> None:
    checkpoint = written(kind=kind, modelopt=modelopt)
    assert experts_rows(checkpoint, experts="vllm") == [f"experts ×2: nvfp4 {row}"]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_fp8_experts_are_vllms(tmp_path: Path) -> None:
    kinds = {"experts": Kind.FP8, "self_attn": Kind.NVFP4_A16}
    moe = moe_checkpoints.write(tmp_path, moe_checkpoints.qwen3(), kinds)
    [row] = experts_rows(moe.path)
    assert row.startswith("experts ×2: fp8 (vLLM: ModelOptFp8MoEMethod")
    assert row.endswith("), W8A8 static")
    change(moe.path, without("model.layers.1.mlp.experts.3.up_proj"))
    with pytest.raises(UnsupportedCheckpoint, match=r"holds no .*experts\.3\.up_proj\.weight, "):
        verified(moe.path)


def test_fp8_experts_have_no_reference(tmp_path: Path) -> None:
    kinds = {"experts": Kind.FP8, "self_attn": Kind.NVFP4_A16}
    moe = moe_checkpoints.write(tmp_path, moe_checkpoints.qwen3(), kinds)
    message = f"{EXPERTS}: holds FP8 per-tensor experts, must hold NVFP4 or 16-bit ones on CPU"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        experts_rows(moe.path)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_user_chooses_who_serves_them(written: Written) -> None:
    checkpoint = written()
    [row] = experts_rows(checkpoint, experts="vllm")
    assert row.startswith("experts ×2: nvfp4 (vLLM: ModelOptNvFp4FusedMoE MARLIN)")


def test_vllm_serves_none_on_a_cpu(written: Written) -> None:
    checkpoint = written()
    assert experts_rows(checkpoint) == experts_rows(checkpoint, experts="own")
    message = f"{EXPERTS}: nvfp4_tc.experts is 'vllm', which has no methods for NVFP4 experts on C"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        experts_rows(checkpoint, experts="vllm")


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_vllm_has_no_method_for(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization import modelopt

    def none(**_: Any) -> None:
        raise NotImplementedError("No NvFp4 MoE backend")

    monkeypatch.setattr(modelopt, "select_nvfp4_moe_backend", none)
    message = rf"{EXPERTS}: holds NVFP4 experts, .* no method for \(No NvFp4 MoE backend\)"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        experts_rows(written(), experts="vllm")
