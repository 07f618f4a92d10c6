"""Worker of vLLM's CPU build that sizes the KV cache by the available memory.

By default vLLM's own worker reserves 92 % of its NUMA node's memory, and fails if other processes
use more than the rest.
"""

import platform
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_world_group
from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_fp4_plugin.engine import host_memory
from vllm_fp4_plugin.engine.host_memory import GIB, HostMemory

logger = init_logger("vllm.nvfp4_tc")

OPTION = "--kv-cache-memory-bytes"
_PADDING = 2  # upper bound: vLLM pads unlike layers to groups of one size


class NoRoomForCache(ValueError):
    """Error: the KV cache of one sequence does not fit into this machine's memory."""


@dataclass(frozen=True)
class CacheNeed:
    """Bytes that a model's KV cache needs on one rank.

    Attributes:
        one: for one sequence of ``max_model_len`` tokens, without padding.
        padded: for one such sequence, with vLLM's maximal padding.
        all: for ``max_num_seqs`` such sequences, with vLLM's maximal padding.
    """

    one: int
    padded: int
    all: int


def need_of(layers: Sequence[Any], vllm_config: Any) -> CacheNeed:
    """Compute the cache need of ``layers``, vLLM's KV-cache specs; vLLM's null block included."""
    block = sum(layer.page_size_bytes for layer in layers)
    one = sum(layer.max_memory_usage_bytes(vllm_config) for layer in layers)
    padding = _PADDING if any(layer != layers[0] for layer in layers) else 1
    several = one * vllm_config.scheduler_config.max_num_seqs
    return CacheNeed(one + block, (one + block) * padding, (several + block) * padding)


def room(memory: HostMemory, ranks: int) -> int:
    """Bytes available to each of ``ranks`` ranks that share ``memory``; a tenth of it stays free.

    The reserve covers the activations of long prompts, which are not measured, and other programs.
    """
    return max(0, memory.available - memory.total // 10) // ranks


def choose(room: int, need: CacheNeed) -> int:
    """Choose the size of a rank's KV cache: half of ``room``, as another server may start later.

    If ``max_num_seqs`` sequences need less, the size is smaller, but at least 1 GiB for cached
    prefixes. If a single sequence needs more, the size is larger, but at most ``room``. All sizes
    are in bytes.
    """
    return min(room, max(need.padded, min(room // 2, max(need.all, GIB))))


class FittingCpuWorker(CPUWorker):
    """vLLM's CPU worker, with a KV cache sized by the memory available once the model is loaded."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        cache = vllm_config.cache_config
        # If no size is set, vLLM 0.32 checks here that its share of the memory is free.
        cache.kv_cache_memory_bytes = 0
        try:
            super().__init__(vllm_config, *args, **kwargs)
        finally:
            cache.kv_cache_memory_bytes = None

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache of this rank.

        Raises:
            NoRoomForCache: one sequence of ``max_model_len`` tokens does not fit; with an automatic
                ``max_model_len``, no sequence fits.
        """
        if self._should_warm_up_model():
            self.model_runner.warming_up_model()
        node = _memory_node()
        ranks = _ranks_on(node)  # all ranks have loaded the model by then
        memory = host_memory.read(node)
        own = room(memory, ranks)
        if self.cache_config.num_gpu_blocks_override is not None:
            return own  # the user has set the number of blocks
        layers = list(self.get_kv_cache_spec().values())
        need = need_of(layers, self.vllm_config)
        if need.one > own:
            self._check_length(layers, own, memory)
        size = choose(own, need)
        logger.info(
            "KV cache: %s of %s available%s, chosen; name another with %s",
            _gib(size), _gib(memory.available), f" to {ranks} ranks" if ranks > 1 else "", OPTION,
        )  # fmt: skip
        return size

    def _check_length(self, layers: Sequence[Any], own: int, memory: HostMemory) -> None:
        """Raise unless ``max_model_len`` is automatic and a shorter one fits into ``own`` bytes."""
        model = self.vllm_config.model_config
        needed, longest = _gib(need_of(layers, self.vllm_config).one), self._longest(layers, own)
        if longest and model.original_max_model_len == -1:
            return
        shorter = f"serve with --max-model-len {longest} or less, " if longest else ""
        raise NoRoomForCache(
            f"max_model_len: is {model.max_model_len}, for which the KV cache takes {needed}, must "
            f"fit into the {_gib(own)} that this rank may take of {_gib(memory.available)} "
            f"available; {shorter}free memory, or name the cache's size with {OPTION}"
        )

    def _longest(self, layers: Sequence[Any], size: int) -> int:
        """Greatest length below ``max_model_len`` that fits into ``size`` bytes; 0 if none fits."""
        model = self.vllm_config.model_config
        given = model.max_model_len

        def needed(length: int) -> int:
            model.max_model_len = length
            return need_of(layers, self.vllm_config).one

        try:
            return bisect_right(range(1, given), size, key=needed)
        finally:
            model.max_model_len = given


def _memory_node() -> int:
    """NUMA node of this process's CPUs; vLLM binds each process to a single node."""
    return int(get_allowed_cpu_list()[0].numa_node)


def _ranks_on(node: int) -> int:
    """Number of the engine's ranks on this machine and NUMA node, this rank included."""
    group = get_world_group()
    here = (platform.node(), node)
    places: list[Any] = [here] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(places, here, group=group.cpu_group)
    return places.count(here)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
