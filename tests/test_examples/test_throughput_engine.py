"""The throughput comparison with real engines, on CPU."""

import json

import pytest

from examples.throughput import process
from examples.throughput.__main__ import main
from tests import preloaded


@pytest.mark.slow
def test_tiny_shape_in_bf16_and_nvfp4(tmp_path, monkeypatch, capsys):
    # One process for each engine instead of three starts faster and tests the same code.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    worker = "examples.throughput.worker"
    monkeypatch.setattr(process, "worker_command", lambda *f: preloaded.command(worker, *f))
    status = main([
        "measure", "tiny", "--quantization", "bf16", "nvfp4-tc", "--batch-sizes", "2",
        "--prompt-tokens", "4", "--output-tokens", "3", "--prefill", "1x32", "--repeats", "1",
        "--enforce-eager", "--out", str(tmp_path),
    ])  # fmt: skip
    results = json.loads((tmp_path / "results.json").read_text())
    assert status == 0, results
    bf16, ours = results["variants"]
    for variant in (bf16, ours):
        assert variant["errors"] == []
        [times] = variant["rounds"]
        assert sorted(times) == ["1x32+1", "2x4+3"]
        assert all(len(repeats) == 1 and repeats[0] > 0 for repeats in times.values())
    assert not any("nvfp4-tc: " in line for line in bf16["kernels"])
    assert any("gate_up_proj ×2: nvfp4_silu_mul_gemm" in line for line in ours["kernels"])
    assert (tmp_path / "throughput.png").is_file()
    assert "decode batch 2" in capsys.readouterr().out
