"""``VLLM_BATCH_INVARIANT`` is refused: what a kernel adds up, and in which order, depends on it."""

from pathlib import Path

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from nvfp4_kernels.gemm.sm90 import choose as sm90
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig as Sm90Output
from nvfp4_kernels.gemm.sm100 import choose as sm100
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig as Sm100Output
from vllm_fp4_plugin import batch_invariance
from vllm_fp4_plugin.batch_invariance import BatchInvarianceRefused

N, K = 4096, 4096


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "named"), [("modelopt", True), ("modelopt", False)])
@pytest.mark.feature(
    "batch invariance",
    "refused",
    "`VLLM_BATCH_INVARIANT` names itself before anything is loaded; without it an answer depends "
    "on the batch by the order of sums: of K in linear layers and experts, of keys in attention",
)
def test_refused(
    fixture: str, named: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_general_plugins()
    model: Path = request.getfixturevalue(fixture)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    method = "nvfp4-tc" if named else None
    args = EngineArgs(model=str(model), quantization=method, enforce_eager=True)
    with pytest.raises(BatchInvarianceRefused, match="VLLM_BATCH_INVARIANT: is set, must not be"):
        args.create_engine_config()


def test_served_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    batch_invariance.refuse()


def test_splits_depend_on_tokens() -> None:
    """The reason for it."""
    hopper = {sm90.choose_config(sm90.Problem(m, N, K), Sm90Output())[0].split_k for m in (8, 512)}
    assert len(hopper) > 1
    output = Sm100Output()
    blackwell = {sm100.choose_config(sm100.Problem(m, N, K), output)[0].split_k for m in (1, 512)}
    assert len(blackwell) > 1


def test_torch_adds_up_otherwise_too() -> None:
    """The CPU's references multiply float32 matrices."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, K, generator=generator), torch.randn(256, K, generator=generator)
    whole = x @ w.T
    assert any(not torch.equal(x[:m] @ w.T, whole[:m]) for m in (1, 2, 3, 4, 8, 16))
