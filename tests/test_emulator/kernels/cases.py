"""Shapes that test_whole_kernels.py runs, and the process that runs them."""

import json
import time

from tests.test_emulator.kernels.config import GemmConfig, Shape

ONE_SM, TWO_SM = GemmConfig(), GemmConfig(two_sm=True)
WIDE = GemmConfig(tile_n=256)
WIDE_TWO_SM = GemmConfig(tile_n=256, two_sm=True)

SHAPES = (
    Shape(128, 128, 256, ONE_SM, "float32"),  # one tile, one step
    Shape(128, 256, 256, WIDE),
    Shape(256, 128, 256, TWO_SM, "float16"),
    Shape(256, 256, 512, WIDE_TWO_SM, "float32"),
    Shape(384, 256, 1280, ONE_SM, sms=2),  # three tiles each, more steps than stages
    Shape(768, 256, 1280, TWO_SM, sms=4),
    Shape(384, 256, 768, WIDE, "float16", sms=1),  # one accumulator
    Shape(1, 8, 32, ONE_SM),  # ragged everywhere
    Shape(130, 200, 288, ONE_SM, "float16", sms=3),
    Shape(300, 132, 1312, TWO_SM, "float32", sms=4),
    Shape(129, 264, 96, WIDE_TWO_SM, sms=2),
)


def main() -> None:
    """Prints a JSON line per shape and schedule: [shape, schedule, result, CPU seconds]."""
    from tests.emulator import STANDARD, EmulatorError, Gpu
    from tests.emulator.runtime import shim

    gpu = Gpu(strict_tensor_fences=True)
    shim.install(gpu)

    import torch

    from tests.test_emulator.kernels.problem import Problem

    torch.set_num_threads(1)
    for shape in SHAPES:
        problem = Problem(shape)
        for schedule in STANDARD:
            gpu.schedule = schedule
            started = time.process_time()
            try:
                result = "right" if problem.run(gpu) else "wrong numbers"
            except EmulatorError as finding:
                result = f"{type(finding).__name__}: {finding}"
            seconds = time.process_time() - started
            print(json.dumps([str(shape), schedule.name, result, seconds]), flush=True)


if __name__ == "__main__":
    main()
