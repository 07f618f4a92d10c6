"""Stand-in for FlashInfer's fused all-reduce, computed by torch, below vLLM's own wrapper.

vLLM's module cannot be imported on a CPU, so its functions are compiled from the source.
"""

import ast
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank

from nvfp4_kernels.formats.nvfp4 import quantize_activation
from nvfp4_kernels.norm.call import AddRmsNormCall
from nvfp4_kernels.norm.reference import add_rms_norm
from vllm_fp4_plugin.ops import flashinfer_all_reduce

MODULE = "vllm.compilation.passes.fusion.allreduce_rms_fusion"
GETTER = "vllm.distributed.device_communicators.flashinfer_all_reduce.get_fi_ar_quant_workspace"
_TAKEN = frozenset({
    "MiB", "PDL_ADVANCE_LAUNCH_TOKENS", "_FI_ALLREDUCE_ONE_SHOT_MAX_SIZES_MB",
    "_select_flashinfer_allreduce_use_oneshot", "call_trtllm_fused_allreduce_norm",
    "FlashInferFusedAllReduceParams",
})  # fmt: skip
NAN = 0x7F  # as a scale


class Comm:
    """Stand-in for the part of ``flashinfer.comm`` that vLLM's wrapper uses.

    Attributes:
        calls: arguments of every call.
    """

    AllReduceFusionPattern = SimpleNamespace(
        kARResidualRMSNormFP8Quant="FP8", kARResidualRMSNormFP4Quant="FP4"
    )
    QuantizationSFLayout = SimpleNamespace(SWIZZLED_128x4="swizzled")

    def __init__(self, add_up: Callable[[Tensor], Tensor]) -> None:
        self.calls: list[dict[str, Any]] = []
        self._add_up = add_up

    def allreduce_fusion(self, **given: Any) -> None:
        """Compute the pattern ``kARResidualRMSNormFP4Quant`` as documented, and poison padding."""
        self.calls.append(given)
        x, residual, weight = given["input"], given["residual_in"], given["rms_gamma"]
        (m, k), scales = x.shape, given["scale_out"]
        assert given["pattern"] == "FP4"
        assert given["layout_code"] == "swizzled"
        assert x.shape == residual.shape == given["residual_out"].shape == given["norm_out"].shape
        assert x.dtype == residual.dtype == weight.dtype
        assert (given["quant_out"].shape, given["quant_out"].dtype) == ((m, k // 2), torch.uint8)
        assert (scales.shape, scales.dtype) == ((-(-m // 128) * 128, k // 16), torch.float8_e4m3fn)
        assert (given["scale_factor"].numel(), given["scale_factor"].dtype) == (1, torch.float32)
        assert given["output"] is None
        assert given["weight_bias"] == 0.0
        rows = self._add_up(x.clone()), residual, weight, given["rms_eps"]
        norm, total = add_rms_norm(AddRmsNormCall(*rows))
        data, blocks = quantize_activation(norm, given["scale_factor"].reciprocal())
        given["quant_out"].copy_(data)
        given["residual_out"].copy_(total)
        given["norm_out"].fill_(torch.nan)
        flat = scales.view(torch.uint8).view(-1).fill_(NAN)
        flat[_swizzled(m, k // 16)] = blocks.view(torch.uint8)


def _swizzled(m: int, columns: int) -> Tensor:
    """Offsets of the scales of ``m`` rows: atoms of 128 rows and 4 columns, 512 bytes each."""
    row, column = torch.arange(m)[:, None], torch.arange(columns)
    atom = (row // 128) * (columns // 4) + column // 4
    return atom * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


def wrapper(comm: Comm, workspace: Any) -> Any:
    """Functions of vLLM's wrapper module, compiled from its source, on top of ``comm``."""
    spec = find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    taken = [node for node in ast.walk(tree) if _name(node) in _TAKEN]
    assert {_name(node) for node in taken} == _TAKEN
    namespace: dict[str, Any] = {
        "Any": Any,
        "torch": torch,
        "flashinfer_comm": comm,
        "ar_fusion_patterns": comm.AllReduceFusionPattern,
        "get_fi_ar_quant_workspace": lambda **_: workspace,
        "get_tensor_model_parallel_rank": get_tensor_model_parallel_rank,
        "get_tp_group": lambda: SimpleNamespace(cpu_group=None),
        "current_platform": SimpleNamespace(
            get_device_capability=lambda: SimpleNamespace(to_int=lambda: 100)
        ),
    }
    body: Any = sorted(taken, key=lambda node: node.lineno)  # type: ignore[attr-defined]
    exec(compile(ast.Module(body, []), spec.origin, "exec"), namespace)
    return SimpleNamespace(**{name: namespace[name] for name in (*_TAKEN, "flashinfer_comm")})


def _name(node: ast.AST) -> str:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return ""


def install(
    patch: pytest.MonkeyPatch, add_up: Callable[[Tensor], Tensor], served: int | None
) -> Comm:
    """Make the plugin find FlashInfer.

    Args:
        patch: monkeypatch that restores the plugin.
        add_up: function that sums a tensor over ranks.
        served: maximum number of tokens in the workspace; None: no workspace can be made.
    """

    class Workspace:
        backend = "mnnvl"

        @staticmethod
        def is_buffer_size_sufficient(
            tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype
        ) -> bool:
            assert served is not None
            return num_tokens <= served

    workspace = None if served is None else Workspace()
    comm = Comm(add_up)
    module = wrapper(comm, workspace)
    patch.setattr(flashinfer_all_reduce, "_wrapper", lambda: module)
    patch.setattr(flashinfer_all_reduce, "_usable", [])
    patch.setattr(GETTER, lambda **_: workspace)
    return comm
