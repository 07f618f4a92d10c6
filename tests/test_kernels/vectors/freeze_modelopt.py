"""Write ``modelopt.safetensors``: weights, and their quantisation by NVIDIA ModelOpt.

Run from the top of the checkout, in an environment with nvidia-modelopt and its requests package:
``python -m tests.test_kernels.vectors.freeze_modelopt``.
"""

from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.test_kernels.producer_inputs import DTYPES, producer_inputs

VECTORS = Path(__file__).with_name("modelopt.safetensors")


def quantize_with_modelopt(x: Tensor) -> dict[str, Tensor]:
    """Packed weight, block scales and global scale by ModelOpt."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import (  # type: ignore[import-not-found]
        NVFP4QTensor,
    )

    packed, scales, global_scale = NVFP4QTensor.quantize(x.clone(), 16)
    return {"data": packed._quantized_data, "scales": scales, "global_scale": global_scale}


def main() -> None:
    """Quantise every input, and save inputs and results."""
    tensors = {}
    for dtype in DTYPES:
        for name, x in producer_inputs(dtype).items():
            key = f"{str(dtype).removeprefix('torch.')} {name}"
            tensors[f"{key}/x"] = x
            for part, tensor in quantize_with_modelopt(x).items():
                tensors[f"{key}/{part}"] = tensor.contiguous()
    metadata = {"nvidia-modelopt": version("nvidia-modelopt"), "torch": torch.__version__}
    save_file(tensors, VECTORS, metadata)
    print(f"{VECTORS}: {len(tensors) // 4} weights, {VECTORS.stat().st_size} bytes, {metadata}")


if __name__ == "__main__":
    main()
