"""Engines of several processes, one after the other: ``python -m tests.features.parallel MODELS``.

``MODELS`` is JSON: paths of ``"bf16"``, served without ``nvfp4-tc``, and of ``"modelopt"``. Prints
a line of JSON for each engine: its name, log-probabilities of ``tiny_llama.TEXT`` and the generated
tokens, or the error that ended the engine. All processes are forks, which need not import anything.
"""

import asyncio
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import Any

from tests import tiny_llama
from tests.engine import count_without_compiling, inspect_models_here, started

STAGES = {"pipeline_parallel_size": 2}
GRID = STAGES | {"tensor_parallel_size": 2}
REQUESTS = 6


def fork_everything() -> None:
    """Make vLLM start its workers, engines and coordinators by forking."""
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    for module in (coordinator, utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")


def allocate_inputs(worker: Any) -> None:
    """Allocate the input buffers of a pipeline stage, as vLLM's warm-up does.

    On a CPU, vLLM skips its warm-up if nothing is compiled; later pipeline stages then fail.
    """
    worker.model_runner._dummy_run(16)


def sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0)


def told(output: Any) -> dict[str, Any]:
    scored = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    return {
        "logprobs": [candidates[token].logprob for candidates, token in scored],
        "generated": list(output.outputs[0].token_ids),
    }


def local(model: str, *, prepared: bool, **arguments: Any) -> dict[str, Any]:
    """Answer, or error, of an engine in this process whose workers are other processes."""
    try:
        with started(model, **arguments) as engine:
            if prepared:
                engine.collective_rpc(allocate_inputs)
            [output] = engine.generate([tiny_llama.TEXT], sampling(), use_tqdm=False)
            del engine
    except Exception as error:  # which is what is asked for
        return {"error": f"{type(error).__name__}: {error}"}
    return told(output)


async def balanced(model: str, ranks: int) -> dict[str, Any]:
    """Answers by engines behind vLLM's load balancer to several requests, and the chosen ranks."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    asked: list[int] = []
    choose = DPLBAsyncMPClient.get_core_engine_for_request

    def recorded(self: Any, request: Any) -> Any:
        engine = choose(self, request)
        asked.append(int.from_bytes(engine, "little"))
        return engine

    DPLBAsyncMPClient.get_core_engine_for_request = recorded
    arguments = AsyncEngineArgs(
        model=model, quantization="nvfp4-tc", enforce_eager=True, max_model_len=128,
        max_num_seqs=2, num_gpu_blocks_override=64, data_parallel_size=ranks,
    )  # fmt: skip
    engine = AsyncLLM.from_engine_args(arguments)

    async def ask(number: int) -> dict[str, Any]:
        text = tiny_llama.TEXT[: 20 + 5 * (number // 2)]
        async for output in engine.generate(text, sampling(), str(number)):
            last = output
        return told(last)

    try:
        answers = await asyncio.gather(*(ask(number) for number in range(REQUESTS)))
    finally:
        engine.shutdown()
        DPLBAsyncMPClient.get_core_engine_for_request = choose
    return {"answers": answers, "asked": asked}


def engines(models: dict[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the answer, or error, of each engine."""
    for kind, model in models.items():
        method = None if kind == "bf16" else "nvfp4-tc"
        shapes = {"one": {}, "stages": STAGES} | ({} if method is None else {"grid": GRID})
        for name, shape in shapes.items():
            said = local(model, prepared=bool(shape), quantization=method, **shape)
            yield f"{kind}, {name}", said
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    for ranks in (1, 2):
        try:
            yield f"balanced, {ranks}", asyncio.run(balanced(models["modelopt"], ranks))
        except RuntimeError as error:  # of an engine that did not start
            yield f"balanced, {ranks}", {"error": str(error)}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    yield "unprepared", local(models["bf16"], prepared=False, quantization=None, **STAGES)


def main() -> None:
    """Run the engines and print their answers."""
    import vllm.entrypoints.llm  # noqa: F401  what all processes would import
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    inspect_models_here()
    count_without_compiling()
    fork_everything()
    for name, said in engines(json.loads(sys.argv[1])):
        print("\n" + json.dumps({"engine": name} | said), flush=True)


if __name__ == "__main__":
    main()
