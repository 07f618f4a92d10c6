"""Log-probabilities from a real vLLM engine; the command runs engines of several processes.

``python -m tests.engine MODEL '{"tensor_parallel_size": 2}' [MODEL ARGUMENTS ...]`` prints a line
of JSON for each engine. vLLM starts the workers of the first engine; with ``--fork`` before the
models, and for further engines, the workers are forked.
"""

import gc
import json
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor
from tests import heap, tiny_llama

NEW_TOKENS = 8  # of a greedy continuation
CACHE_BLOCKS = 64  # of the KV cache, which else has 1 GiB


@dataclass(frozen=True)
class Run:
    """Answer of one engine to the prompt ``tiny_llama.TEXT``.

    Attributes:
        logprobs: natural log-probability of each token of the text except the first.
        generated: token ids of a greedy continuation.
        report: kernel report of the engine; empty if the engine ran in another process or without
            ``nvfp4-tc``.
    """

    logprobs: list[float]
    generated: list[int]
    report: list[str]


def inspect_models_here() -> None:
    """Make vLLM inspect architectures in this process, instead of in child processes."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def replace_kernels_once() -> None:
    """Make vLLM replace Triton kernels by functions only for the first engine of a process.

    For every further engine vLLM would search all modules for its own replacements. The search
    fails in llvmlite's modules, which models with audio import.
    """
    from vllm.triton_utils import dispatcher

    if dispatcher._registry:
        dispatcher.register_kernels = lambda overrides: None
        return
    register = dispatcher.register_kernels

    def without_llvmlite(overrides: Any) -> None:
        hidden = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "llvmlite"}
        for name in hidden:
            del sys.modules[name]
        try:
            register(overrides)
        finally:
            sys.modules.update(hidden)
            dispatcher.register_kernels = register

    dispatcher.register_kernels = without_llvmlite


def count_without_compiling() -> None:
    """Make vLLM rank tokens by an eager function; compiling takes 15 s per process."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = lambda x, values: (x >= values).sum(-1)


@contextmanager
def local_engine(model: str, **engine_args: Any) -> Iterator[Any]:
    """Context with an engine in this process, which is shut down at the end of the context."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers import rotary_embedding

    replace_kernels_once()
    count_without_compiling()
    # vLLM caches rotary embeddings across engines; a refused reload leaves them without values.
    with heap.set_aside(), patch.dict(rotary_embedding._ROPE_DICT, clear=True):
        llm = None
        try:
            llm = LLM(model, **engine_args)
            yield llm
        finally:
            # A caller's frame or an error's traceback may keep the engine until the next one runs.
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()


def started(model: str, **engine_args: Any) -> AbstractContextManager[Any]:
    """Context with a ``local_engine`` that has the settings of most tests."""
    settings = {
        "quantization": "nvfp4-tc",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 2,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "num_gpu_blocks_override": CACHE_BLOCKS,
    }
    return local_engine(model, **(settings | engine_args))


def run(
    model: str, text: str = tiny_llama.TEXT, new_tokens: int = NEW_TOKENS, **engine_args: Any
) -> Run:
    """Start an engine, score the text, continue it, and shut the engine down."""
    from vllm import SamplingParams

    with started(model, **engine_args) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, prompt_logprobs=0)
        [output] = llm.generate([text], sampling, use_tqdm=False)
        scored = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        quant = llm.llm_engine.vllm_config.quant_config
        report = quant.startup.report.lines() if hasattr(quant, "startup") else []
        del llm
        return Run(
            [candidates[token].logprob for candidates, token in scored],
            list(output.outputs[0].token_ids),
            report,
        )


def report_command(*arguments: str | Path) -> Result:
    """Run ``python -m vllm_fp4_plugin report`` in this process, whose log level is restored."""
    return _command("report", *arguments)


def verify_command(*arguments: str | Path) -> Result:
    """Run ``python -m vllm_fp4_plugin verify`` in this process."""
    return _command("verify", *arguments)


def catalogue_command(*arguments: str | Path) -> Result:
    """Run ``python -m vllm_fp4_plugin catalogue`` in this process."""
    return _command("catalogue", *arguments)


def _command(*arguments: str | Path) -> Result:
    from vllm_fp4_plugin.__main__ import app

    logger = logging.getLogger("vllm")
    level = logger.level
    try:
        environment = {"VLLM_LOGGING_LEVEL": "ERROR"}
        with heap.set_aside():
            return CliRunner().invoke(app, list(map(str, arguments)), env=environment)
    finally:
        logger.setLevel(level)


def dequantized(checkpoint: Path) -> Run:
    """Log-probabilities by transformers in float32, with weights that the tests dequantise."""
    tensors = load_file(checkpoint / "model.safetensors")
    values = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if f"{module}.weight_scale_2" in tensors:
            scales = tensors[f"{module}.weight_scale"], tensors[f"{module}.weight_scale_2"]
            values[name] = Nvfp4Tensor(tensor, *scales).dequantize()
        else:
            values[name] = tensor.float()
    return with_values(checkpoint, values)


def with_values(
    checkpoint: Path,
    values: Mapping[str, torch.Tensor],
    inputs: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
) -> Run:
    """Log-probabilities by transformers in float32, with ``values`` as the model's tensors.

    ``inputs`` are functions by module name that round a module's input.
    """
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(checkpoint)).eval()
    model.load_state_dict({name: values[name] for name in model.state_dict()})
    for name, rounded in (inputs or {}).items():
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, given, rounded=rounded: (rounded(given[0]),)
        )
    ids = torch.tensor([tiny_llama.tokenizer().encode(tiny_llama.TEXT)])
    with torch.inference_mode():
        scores = model(input_ids=ids).logits.log_softmax(-1)[0, :-1]
    return Run(scores.gather(-1, ids[0, 1:, None]).flatten().tolist(), [], [])


def distance(a: Run, b: Run) -> float:
    """Mean absolute difference of the log-probabilities."""
    pairs = zip(a.logprobs, b.logprobs, strict=True)
    return sum(abs(x - y) for x, y in pairs) / len(a.logprobs)


def fork_workers() -> None:
    """Make later engines fork their workers, which then import nothing."""
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def main(given: Sequence[str]) -> None:
    """Run the engines one after the other."""
    inspect_models_here()
    if given[0] == "--fork":
        given = given[1:]
        fork_workers()
    for model, engine_args in zip(given[::2], given[1::2], strict=True):
        result = run(model, **json.loads(engine_args))
        print("\n" + json.dumps({"logprobs": result.logprobs, "generated": result.generated}))
        fork_workers()


if __name__ == "__main__":
    main(sys.argv[1:])
