"""Emulated kernel inside a vLLM worker process; the command prints JSON.

``python -m tests.test_emulator.kernels.in_vllm MODEL``
"""

import json
import os
import sys
from typing import Any

from tests.test_emulator.kernels.config import GemmConfig, Shape


def in_worker(worker: Any) -> dict[str, Any]:
    """Run a kernel in a worker, by vLLM's RPC; returns the kernel's record."""
    from tests.devices import emulated
    from tests.emulator import EAGER

    with emulated(EAGER) as device:
        from tests.test_emulator.kernels.problem import Problem

        exact = Problem(Shape(128, 128, 256, GemmConfig())).run(device)
        multiplies = device.gpu.launches[-1].counters.multiplies
    counted = {" ".join(map(str, key)): n for key, n in multiplies.items()}
    return {"process": os.getpid(), "exact": exact, "multiplies": counted}


def main() -> None:
    # Functions are pickled to reach the worker.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm import LLM

    from tests.engine import inspect_models_here
    from tests.forking_vllm import fork_processes

    inspect_models_here()
    fork_processes()
    llm = LLM(
        sys.argv[1],
        quantization="nvfp4-tc",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        gpu_memory_utilization=0.2,
    )
    [found] = llm.collective_rpc(in_worker)
    print("\n" + json.dumps({"here": os.getpid(), **found}))


if __name__ == "__main__":
    main()
