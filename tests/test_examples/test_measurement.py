"""Completions, log-probabilities and the kernel report, requested from a stand-in server."""

import sys
from pathlib import Path

import numpy as np
import pytest

from examples.completions import Batch, Completion, complete, connect, token_logprobs
from examples.demo.kernel_report import LayerKernel, parse_kernel_report
from examples.demo.measurement import ALONE, PROMPTS, Measurement, measure
from examples.server import free_port, running
from tests import limits

FAKE = Path(__file__).with_name("fake_vllm.py")
LOG = """\
(Worker pid=7) INFO 01-01 00:00:00 [config.py:192] nvfp4-tc: qkv_proj ×4: nvfp4_gemm/reference (cpu)
(Worker pid=7) INFO 01-01 00:00:00 [config.py:192] nvfp4-tc: lm_head ×1: bf16, in the ignore list
(Worker pid=7) INFO 01-01 00:00:00 [config.py:192] nvfp4-tc: weights: 0.5626 bytes per weight
an unrelated ×3: line
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    port = free_port()
    command = [sys.executable, str(FAKE), str(port), "nvfp4-tc: o_proj ×2: nvfp4_gemm/sm100"]
    with running(command, port, tmp_path_factory.mktemp("logs") / "log", limits.PROCESS) as server:
        yield server


def test_kernel_report_is_read_from_the_log():
    assert parse_kernel_report(LOG) == [
        LayerKernel("qkv_proj", 4, "nvfp4_gemm/reference (cpu)"),
        LayerKernel("lm_head", 1, "bf16, in the ignore list"),
    ]


def test_log_without_report_is_an_error():
    with pytest.raises(ValueError, match=r"no line `nvfp4-tc: <layer> ×<count>: <kernel>`"):
        parse_kernel_report("INFO ready\nnvfp4-tc: weights: 0.5 bytes per weight\n")


def test_logprobs_are_of_all_tokens_but_the_first(server):
    with connect(server.url) as client:
        found = token_logprobs(client, np.array([5, 100, 250], dtype=np.uint16))
    np.testing.assert_array_equal(found, [-1.0, -2.5])


def test_completions_keep_the_order_of_prompts(server):
    prompts = [f"prompt {i}" for i in range(9)]
    with connect(server.url) as client:
        batch = complete(client, prompts, max_tokens=3, at_once=4)
    assert batch.completions == [Completion(prompt, "xxx", 3) for prompt in prompts]
    assert batch.seconds > 0


def test_speed_counts_the_tokens_of_all_completions():
    batch = Batch([Completion("a", "x", 6), Completion("b", "x", 4)], seconds=2.5)
    assert batch.tokens_per_second == 4


def test_measurement_is_complete_and_survives_the_cache(server, tmp_path):
    windows = np.arange(400, dtype=np.uint16).reshape(8, 50)
    done = []
    found = measure(server, windows, 5, quantised=True, on_window=lambda: done.append(1))
    assert len(done) == 8
    np.testing.assert_allclose(found.logprobs, windows[:, 1:] / -100)
    assert [c.prompt for c in found.completions] == list(PROMPTS[:ALONE])
    assert {c.text for c in found.completions} == {"xxxxx"}
    assert found.kernels == [LayerKernel("o_proj", 2, "nvfp4_gemm/sm100")]
    assert found.ready_seconds == server.ready_seconds
    found.write(tmp_path / "measurement.json")
    assert Measurement.read(tmp_path / "measurement.json") == found
