"""Form of an FP8 key's scale: vLLM tells for the local device, and a plan for the planned one."""

import pytest

from vllm_fp4_plugin.device import planned_for
from vllm_fp4_plugin.indexer import choice

ASKED = "mqa_logits_use_mx_scales"


@pytest.mark.parametrize("local", [True, False])
def test_a_plan_does_not_ask_the_local_device(local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice.deep_gemm, ASKED, lambda: local, raising=False)
    assert choice.has_exponent_scales() is local
    for arch, expected in (("sm_90", False), ("sm_100", True), ("sm_103", True)):
        with planned_for(arch):
            assert choice.has_exponent_scales() is expected


def test_a_release_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(choice.deep_gemm, ASKED, raising=False)
    with planned_for("sm_100"):
        assert not choice.has_exponent_scales()
