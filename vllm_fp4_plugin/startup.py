"""Startup: record layers and kernels when built; compile and log once all weights are loaded."""

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

# A child of vLLM's logger, so that its handlers print messages among the start-up lines.
logger = init_logger("vllm.nvfp4_tc")

LAYER, NVFP4_LINEAR = "layer", "NVFP4 linear layer"


class Startup:
    """Record of a process's layers, from the first that is built to the last that is loaded.

    Attributes:
        report: report of every layer's kernel.
        products: keys of the kernels to compile before the first request, by layer.
        max_tokens: largest number of tokens of a batch; 0 while ``products`` is empty.
        pending: names of quantised layers with weights still to be loaded.
    """

    def __init__(self) -> None:
        self.report = Report()
        self.products: dict[str, Served] = {}
        self.max_tokens = 0
        self.pending: set[str] = set()
        self._names: dict[str, dict[str, None]] = {}  # names of layers, by ``what``
        self._patterns: list[tuple[str, str, str]] = []

    def expect_match(self, option: str, patterns: Iterable[str], what: str = LAYER) -> None:
        """Record patterns of an option, for a warning about every pattern that covers no layer.

        Args:
            option: name of the option.
            patterns: patterns of the option.
            what: kind of the layers that the patterns should cover, as passed to ``register``.
        """
        self._patterns += [(option, pattern, what) for pattern in patterns]

    def register(self, prefix: str, shard_names: Iterable[str], what: str = LAYER) -> None:
        """Record a layer of kind ``what`` under its name and the shards' checkpoint names."""
        self._names.setdefault(what, {}).update(dict.fromkeys((prefix, *shard_names)))

    def unquantized(self, layer: Any, prefix: str, reason: str) -> None:
        """Record a linear layer that vLLM runs in 16 bits, with the reason."""
        n = sum(getattr(layer, "output_partition_sizes", [layer.output_size]))
        elements = n * getattr(layer, "input_size_per_partition", layer.input_size)
        size = elements * layer.params_dtype.itemsize
        self.report.add(LayerRecord.unquantized(prefix, reason, elements, size))

    def require_kernels(self, prefix: str, product: Served | None) -> None:
        """Record the kernels to compile for a layer, in place of earlier ones; None: no change."""
        if product is not None:
            self.products[prefix] = product
            self.max_tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens

    def idle_patterns(self) -> list[str]:
        """Warnings about the user's patterns that cover no layer built so far."""
        return [
            f"{KEY}.{option}: {pattern!r} covers no {what} of this process; name modules as the "
            "report does, or their shards (q_proj)"
            for option, pattern, what in self._patterns
            if all(ignore.matches(name, [pattern]) is None for name in self._names.get(what, ()))
        ]

    def loaded(self, prefix: str, device: torch.device) -> None:
        """Record that a layer's weights are in place; after the last layer, compile and log."""
        self.pending.discard(prefix)
        if self.pending:
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
