"""Shapes that test_whole_kernels.py runs, and the process that runs them."""

import json
import sys
import time

from tests.test_emulator.kernels.config import GemmConfig

ONE_SM, TWO_SM = GemmConfig(), GemmConfig(two_sm=True)
WIDE = GemmConfig(tile_n=256)
WIDE_TWO_SM = GemmConfig(tile_n=256, two_sm=True)

# m, n, k, config, dtype, SMs
SHAPES = (
    (128, 128, 256, ONE_SM, "float32", 148),  # one tile, one step
    (128, 256, 256, WIDE, "bfloat16", 148),
    (256, 128, 256, TWO_SM, "float16", 148),
    (256, 256, 512, WIDE_TWO_SM, "float32", 148),
    (384, 256, 1280, ONE_SM, "bfloat16", 2),  # three tiles each, more steps than stages
    (768, 256, 1280, TWO_SM, "bfloat16", 4),
    (384, 256, 768, WIDE, "float16", 1),  # one accumulator
    (1, 8, 32, ONE_SM, "bfloat16", 148),  # ragged everywhere
    (130, 200, 288, ONE_SM, "float16", 3),
    (300, 132, 1312, TWO_SM, "float32", 4),
    (129, 264, 96, WIDE_TWO_SM, "bfloat16", 2),
)
SPEED = (128, 256, 256, WIDE, "bfloat16", 148)


def main() -> None:
    """Prints a JSON line per shape and schedule: [shape, schedule, result, seconds]."""
    from tests.emulator import STANDARD, EmulatorError, Gpu
    from tests.emulator.runtime import shim

    gpu = Gpu(strict_tensor_fences=True)
    shim.install(gpu)

    import torch

    from tests.test_emulator.kernels.problem import Problem

    torch.set_num_threads(1)
    for shape in (*SHAPES, SPEED):
        problem = Problem(*shape)
        for schedule in STANDARD:
            gpu.schedule = schedule
            started = time.monotonic()
            try:
                result = "right" if problem.run(gpu) else "wrong numbers"
            except EmulatorError as finding:
                result = f"{type(finding).__name__}: {finding}"
            seconds = time.monotonic() - started
            print(json.dumps([str(problem), schedule.name, result, seconds]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
