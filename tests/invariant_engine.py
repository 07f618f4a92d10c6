"""Answers of one engine to the same prompts: alone, in a batch, in chunks, from cached prefixes.

``VLLM_BATCH_INVARIANT=1 python -m tests.invariant_engine MODEL '{"max_model_len": 512}' COUNTS``
runs the engine in a separate process and writes to the file ``COUNTS`` how many tokens get other
log-probabilities than alone. The longest prompts need this ``max_model_len``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests import tiny_llama
from tests.engine import started

PREFIX = tiny_llama.TEXT
# The prefix fills whole blocks of the cache; the longest prompts are prefilled in chunks.
PROMPTS = [
    "x",
    "import os",
    PREFIX,
    PREFIX + "\n\nclass Value:\n",
    PREFIX + "\n\nclass Value:\n    def __init__(self, value: int) -> None:\n",
    "def f(a, b):\n    return a + b\n",
]
CHUNK = 48  # tokens of a step: prompts beside one another are cut anywhere

Answer = list[tuple[int, dict[int, float]]]


def serve(model: Path, **engine_args: Any) -> Any:
    settings: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": CHUNK,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "max_model_len": 256,
        "num_gpu_blocks_override": 256,
    }
    return started(str(model), **(settings | engine_args))


def answers(llm: Any, prompts: list[str], *, score: bool = False, tokens: int = 24) -> list[Answer]:
    """Tokens of each prompt's continuation, or of the prompt itself, with their candidates."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=1 if score else tokens, logprobs=5, ignore_eos=True,
        prompt_logprobs=0 if score else None,
    )  # fmt: skip
    found = []
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        written, candidates = output.outputs[0].token_ids, output.outputs[0].logprobs
        if score:
            written, candidates = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
        pairs = zip(written, candidates, strict=True)
        found.append([(t, {c: v.logprob for c, v in each.items()}) for t, each in pairs])
    return found


def alone(llm: Any, prompts: list[str], *, score: bool = False) -> list[Answer]:
    found = []
    for prompt in prompts:
        assert llm.reset_prefix_cache()
        found += answers(llm, [prompt], score=score)
    return found


def differing(some: list[Answer], others: list[Answer]) -> int:
    """Number of tokens with a candidate whose log-probability differs."""
    pairs = zip(some, others, strict=True)
    return sum(a != b for one, other in pairs for a, b in zip(one, other, strict=True))


def main(model: str, arguments: str, file: str) -> None:
    """Write the numbers of tokens that differ in a batch and from cached prefixes, and the total.

    The numbers go to a file, as vLLM may print further lines.
    """
    with serve(Path(model), **json.loads(arguments)) as llm:
        prompts = [*PROMPTS, PREFIX * 2, PREFIX * 3 + "x = 1"]
        expected = alone(llm, prompts) * 2
        assert llm.reset_prefix_cache()
        batch, cached = (answers(llm, prompts * 2) for _ in range(2))
        counts = differing(batch, expected), differing(cached, expected), sum(map(len, expected))
        Path(file).write_text(json.dumps(counts))
        del llm


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
