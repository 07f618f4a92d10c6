"""Families beyond Llama on a GPU, compiled and in CUDA graphs: hybrids, images, drafts.

Only weights are NVFP4, except in mixed precision. The references are those of the CPU tests, whose
helpers are imported here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip(f"needs sm_90, {torch.cuda.get_device_name()} is not", allow_module_level=True)

from transformers import AutoModelForCausalLM

from tests.catalogue import checkpoint, reference
from tests.catalogue.facts import named
from tests.test_plugin.engine.test_drafts import ALIKE, TIE, Drafted, drafted, eagle, share, worst
from tests.test_plugin.engine.test_images import CASES as IMAGES
from tests.test_plugin.engine.test_images import shown
from tests.test_plugin.engine.test_model_families import (
    BY_NAME,
    NEMOTRON_2,
    QWEN_38,
    Served,
    served,
    weight_only,
)

__all__ = ["drafted", "served"]  # fixtures

pytestmark = pytest.mark.slow

SAME = 0.03
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 1 << 28,  # unmeasured: other processes may come and go
    "gdn_prefill_backend": "triton",  # else flashinfer's, which not every machine has
}
W4A16 = "nvfp4_gemm_w4a16/wgmma (sm_90), W4A16"
FAMILIES = {
    "hybrid GDN": (weight_only(QWEN_38), f"in_proj_qkvz ×3: {W4A16}"),
    "Mamba-2 hybrid": (weight_only(NEMOTRON_2), f"in_proj ×1: {W4A16}"),
    "local attention": (
        weight_only(BY_NAME["Gemma 4 (dense, vision), compressed-tensors"]),
        f"qkv_proj ×6: {W4A16}",
    ),
    "mixed precision": (
        BY_NAME["Qwen 3.6 (hybrid GDN, vision), mixed"],
        f"down_proj ×4: {W4A16}",
    ),
}


@pytest.mark.parametrize(("family", "line"), FAMILIES.values(), ids=FAMILIES)
def test_log_probabilities(family: Any, line: str, served: Callable[..., Served]) -> None:
    of = served(family, **GRAPHS)
    assert any(each.startswith(line) for each in of.report), of.report
    assert of.distance() < SAME
    assert min(of.distances_of_mutants().values()) > SAME


@pytest.mark.parametrize("name", ["Qwen 3.8", "Qwen 3 VL", "Nemotron Nano 2 VL"])
def test_an_image(name: str, tmp_path: Path) -> None:
    of = shown(IMAGES[name], tmp_path, **GRAPHS)
    assert any(W4A16 in each for each in of.report), of.report
    assert of.distance(of.pixels) < SAME < of.distance(255 - of.pixels)


def test_a_draft(tmp_path: Path, drafted: Callable[..., Drafted]) -> None:
    """EAGLE 3 drafts in NVFP4 and with equal values in 16 bits propose the same tokens."""
    target = checkpoint.write(
        weight_only(named("Llama 3")), tmp_path / "target", reference.even_out
    )
    roundings = reference.decode(target, tmp_path / "decoded")
    model = reference.load(AutoModelForCausalLM, tmp_path / "decoded", roundings)

    def speculate(name: str, *, nvfp4: bool, seed: int = 5) -> Drafted:
        draft = eagle(target, tmp_path / name, nvfp4=nvfp4, seed=seed)
        settings = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
        if nvfp4:  # vLLM asks for a draft apart; unasked only a CPU's is ours
            settings["quantization"] = "nvfp4-tc"
        return drafted(target, speculative_config=settings, **GRAPHS)

    plain, nvfp4 = speculate("plain", nvfp4=False), speculate("nvfp4", nvfp4=True)
    other = speculate("other", nvfp4=True, seed=6)
    for run in (plain, nvfp4, other):
        assert worst(model, run.generated) < TIE
    assert nvfp4.methods["qkv_proj"] == nvfp4.methods["down_proj"] == "Nvfp4LinearMethod"
    assert share(plain, nvfp4) > ALIKE > share(plain, other)
