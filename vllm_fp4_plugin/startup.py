"""Startup: what a process's model is found to need while it is built, done and told once loaded."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from vllm_fp4_plugin import ignore, warmup
from vllm_fp4_plugin.options import KEY, METHOD
from vllm_fp4_plugin.report import LayerRecord, Report
from vllm_fp4_plugin.warmup import Served

# vLLM's handlers hang on its own logger, so that messages appear among its start-up lines.
logger = init_logger("vllm.nvfp4_tc")

LAYER, NVFP4_LINEAR = "layer", "NVFP4 linear layer"


class Startup:
    """Account of one process's layers, from the first that is built to the last that is loaded.

    Attributes:
        report: report of which kernel every layer got.
        products: products by layer, whose kernels are to be there before requests come.
        max_tokens: tokens of a batch at most; 0 while no product is expected.
        waiting: names of quantised layers whose weights are not in place yet.
    """

    def __init__(self) -> None:
        self.report = Report()
        self.products: dict[str, Served] = {}
        self.max_tokens = 0
        self.waiting: set[str] = set()
        self._names: dict[str, dict[str, None]] = {}  # of layers, by what they are
        self._patterns: list[tuple[str, str, str]] = []

    def watch(self, option: str, patterns: Iterable[str], what: str = LAYER) -> None:
        """Note patterns that the user gave as an option, of which each should cover a layer.

        Args:
            option: the option.
            patterns: its patterns.
            what: what it is for, as ``built`` is told.
        """
        self._patterns += [(option, pattern, what) for pattern in patterns]

    def built(self, prefix: str, shard_names: Iterable[str], what: str = LAYER) -> None:
        """Note a layer, and the names its shards have in the checkpoint."""
        self._names.setdefault(what, {}).update(dict.fromkeys((prefix, *shard_names)))

    def unquantized(self, layer: Any, prefix: str, reason: str) -> None:
        """Record a linear layer that vLLM runs in 16 bits, and why."""
        n = sum(getattr(layer, "output_partition_sizes", [layer.output_size]))
        elements = n * getattr(layer, "input_size_per_partition", layer.input_size)
        size = elements * layer.params_dtype.itemsize
        self.report.add(LayerRecord.unquantized(prefix, reason, elements, size))

    def expect(self, prefix: str, product: Served | None) -> None:
        """Note what a layer needs compiled, in place of what was noted; None: nothing."""
        if product is not None:
            self.products[prefix] = product
            self.max_tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens

    def idle_patterns(self) -> list[str]:
        """Warnings about patterns of the user that cover no layer built so far."""
        return [
            f"{KEY}.{option}: {pattern!r} covers no {what} of this process; name modules as the "
            "report does, or their shards (q_proj)"
            for option, pattern, what in self._patterns
            if all(ignore.matches(name, [pattern]) is None for name in self._names.get(what, ()))
        ]

    def loaded(self, prefix: str, device: torch.device) -> None:
        """Note that a layer's weights are in place; after the last, compile and log the report."""
        self.waiting.discard(prefix)
        if self.waiting:
            return
        lines, rank = self.report.lines(), get_tensor_model_parallel_rank()
        if self.products and warmup.is_wanted(device):
            products = set(self.products.values())
            lines.append(warmup.compile_products(products, self.max_tokens, device))
        if rank == 0:
            for line in filter(None, lines):
                logger.info("%s: %s", METHOD, line)
            for warning in self.idle_patterns():
                logger.warning("%s", warning)
