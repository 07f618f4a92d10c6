"""Peak memory depends on the largest tensor, not on the size of the checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file
from transformers import LlamaConfig

from tests import moe_checkpoints
from tests.test_quantizer.checkpoints import SHAPE, change_config, read_tensors, save_checkpoint
from tests.test_quantizer.mixtures import save_mixture, stack

pytestmark = pytest.mark.processes

LAYERS = 4
LAYER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 1,
}
LARGEST_BYTES = 4096 * 1024 * 2

MEASURE = """
import sys
from pathlib import Path
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

small, large, text = map(Path, sys.argv[1:])
options = dict(calibrate=text, seq_len=32, calibration_tokens=64, max_shard_bytes=50_000_000)
quantize_checkpoint(small, large.with_name("small-dst"), **options)  # loads what it will need
before = peak()
quantize_checkpoint(large, large.with_name("large-dst"), **options)
print(peak() - before)
"""


def save_large(folder: Path) -> int:
    """Save a Llama with equal layers, each in a separate shard; returns the size in bytes."""
    save_checkpoint(folder, LlamaConfig(**SHAPE | LAYER))
    change_config(folder, num_hidden_layers=LAYERS)
    tensors = read_tensors(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shard = {n.replace("model.layers.0.", prefix): t for n, t in tensors.items()}
        if layer:
            shard = {n: t for n, t in shard.items() if n.startswith(prefix)}
        save_file(shard, folder / f"{layer}.safetensors")
        weight_map |= dict.fromkeys(shard, f"{layer}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_peak_memory(llama: Path, text: Path, tmp_path: Path):
    total = save_large(tmp_path / "large")
    assert total > 15 * LARGEST_BYTES

    # One weight, its quarter-size result, and float32 intermediates of one slice of rows.
    assert peak(llama, tmp_path / "large", text) < 7 * LARGEST_BYTES < total / 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_peak_memory_of_experts(text: Path, tmp_path: Path):
    """Experts are quantised one by one, though all of a layer's experts lie in two tensors."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512}
    small = save_mixture(tmp_path / "small", moe_checkpoints.qwen3(**sizes, num_experts=4))
    large = save_mixture(tmp_path / "large", moe_checkpoints.qwen3(**sizes, num_experts=128))
    stack(large)
    stack_bytes = max(t.nbytes for t in read_tensors(large).values())
    assert stack_bytes == 128 * 2 * 512 * 256 * 2

    # Memory that does not grow with the experts: code of the products, one slice's intermediates.
    assert peak(small, large, text) < stack_bytes / 2


def peak(small: Path, large: Path, text: Path) -> int:
    """Growth of peak memory, in bytes, when a process quantises ``large`` after ``small``."""
    paths = os.pathsep.join(path for path in sys.path if path)
    # One thread: the slices are small, and threads that wait for a busy machine take minutes.
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, small, large, text]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(shown.stdout)
