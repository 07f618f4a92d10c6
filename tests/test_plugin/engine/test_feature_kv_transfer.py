"""Keys and values moved from one engine to another by vLLM's connectors.

The cache of each layer has the shape ``(pages, KV heads, page size, 2 · head size)``: a slot holds
a key and its value, in the model's dtype or as E4M3 bytes. This is vLLM's layout ``LBHNC``; the
strides may be those of another layout, see ``PagedAttentionBackend``.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny_llama
from tests.engine import Run, started

pytestmark = pytest.mark.slow

PAGE = 16
TEXTS = [tiny_llama.TEXT, tiny_llama.TEXT[:40] + "x"]


def ask(model: Path, **arguments: Any) -> tuple[list[Run], list[int], list[str]]:
    """Answers of a new engine, numbers of prompt tokens that it did not compute, and its report."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)
    with started(str(model), block_size=PAGE, **arguments) as engine:
        outputs = engine.generate(TEXTS, sampling, use_tqdm=False)
        report = engine.llm_engine.vllm_config.quant_config.startup.report.lines()
        del engine
    runs = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        scored = zip(output.outputs[0].logprobs, tokens, strict=True)
        runs.append(Run([candidates[token].logprob for candidates, token in scored], tokens, []))
    return runs, [output.num_cached_tokens for output in outputs], report


@pytest.mark.parametrize("fixture", ["modelopt", "weight_only"], ids=["FP8 cache", "16-bit cache"])
@pytest.mark.feature(
    "KV connector",
    "works",
    "`ExampleConnector`: one engine prefills, another decodes from its keys and values; "
    "identical tokens; FP8 and 16-bit caches, our attention",
)
def test_from_one_engine_to_another(
    fixture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = request.getfixturevalue(fixture)
    expected, _, _ = ask(model)

    def transfer(role: str) -> dict[str, Any]:
        where = {"shared_storage_path": str(tmp_path)}
        config = {"kv_connector": "ExampleConnector", "kv_role": role}
        return {"kv_transfer_config": config | {"kv_connector_extra_config": where}}

    computed, taken, report = ask(model, **transfer("kv_producer"))
    assert computed == expected
    assert taken == [0, 0]
    assert any(line.startswith("attn ×2: nvfp4_paged_attention") for line in report)
    decoded, taken, _ = ask(model, **transfer("kv_consumer"))
    assert decoded == expected
    assert taken == [64, 32]
    for file in tmp_path.rglob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: torch.zeros_like(each) for name, each in tensors.items()}, file)
    broken, _, _ = ask(model, **transfer("kv_consumer"))
    assert broken != expected


@pytest.mark.feature(
    "KV offloading",
    "not in vLLM on a CPU",
    "vLLM refuses `OffloadingConnector`: it offloads from GPUs only",
)
def test_offloading() -> None:
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    unstarted: Any = SimpleNamespace(_worker=None)
    with pytest.raises(Exception, match="only supported on CUDA-alike"):
        CPUOffloadingSpec.get_worker(unstarted, None)  # type: ignore[arg-type]
