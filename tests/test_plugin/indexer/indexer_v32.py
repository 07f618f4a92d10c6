"""Tiny layer of DeepSeek V3.2 with random weights: the indexer in vLLM's generic model."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.test_kernels.indexer.indexer_oracle import dequantize, quantize
from tests.test_kernels.oracle import Float64
from tests.test_plugin.indexer.indexer_layer import (
    CACHE,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LORA,
    MAX_MODEL_LEN,
    PREFIX,
    ROTATED,
    Driver,
    Handed,
)


def traits(top_k: int) -> Any:
    """Fields of the model's config that the indexer reads."""
    return SimpleNamespace(
        index_topk=top_k, index_n_heads=HEADS, index_head_dim=HEAD_DIM, qk_rope_head_dim=ROTATED
    )


def ask_for(vllm_config: Any, fmt: str | None) -> str:
    """Set the option ``indexer_format``, or only the method if None; returns the format."""
    vllm_config.model_config.quantization = "nvfp4-tc" if fmt is None else None
    if fmt is not None:
        vllm_config.additional_config = {"nvfp4_tc": {"indexer_format": fmt}}
    return fmt or "fp8"


def give_weights(module: Any, random: torch.Generator) -> None:
    for weight in module.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=random) * 0.3)
    for linear in (module.wq_b, module.wk_weights_proj):
        linear.quant_method.process_weights_after_loading(linear)


def rotation(*, neox: bool = True) -> Any:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return get_rope(
        ROTATED, max_position=MAX_MODEL_LEN, rope_parameters=parameters, is_neox_style=neox
    )


def values_of(q: Tensor, fmt: str) -> Float64:
    """Values of the queries: 16-bit, or FP8 with the scales folded into the head weights."""
    if q.dtype == torch.bfloat16:
        return quantize(fmt, q).values
    return dequantize("fp8", q, torch.ones(q.shape[:2]))


class GenericLayer(Driver):
    """Driver of ``deepseek_v2.Indexer``."""

    def __init__(
        self, vllm_config: Any, fmt: str | None, top_k: int = 16, next_n: int = 1, wider: int = 0
    ) -> None:
        from vllm.model_executor.models import deepseek_v2

        from vllm_fp4_plugin.indexer import layer

        fmt = ask_for(vllm_config, fmt)
        self.indexer = deepseek_v2.Indexer(
            vllm_config, traits(top_k), HIDDEN, LORA, None, vllm_config.cache_config,
            torch.empty(800, top_k + wider, dtype=torch.int32), prefix=PREFIX,
        )  # fmt: skip
        layer.keep_queries(self.indexer)
        op = self.indexer.indexer_op
        super().__init__(
            vllm_config, self.indexer.k_cache, op.topk_indices_buffer, top_k, fmt, next_n
        )
        give_weights(self.indexer, self.random)
        # vLLM's CPU kernel supports other shapes only.
        self.rotation = rotation().forward_native
        self.handed: list[Handed] = []
        run = op.forward

        def forward(hidden: Tensor, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
            self.handed.append(Handed(values_of(q, fmt), weights, k))
            return run(hidden, q, k, weights)

        op.forward = forward

    def run(self, positions: Tensor, metadata: Any) -> Handed:
        from vllm.forward_context import set_forward_context

        hidden = torch.randn(len(positions), HIDDEN, generator=self.random).bfloat16()
        qr = torch.randn(len(positions), LORA, generator=self.random).bfloat16()
        with set_forward_context({CACHE: metadata}, self.vllm_config):
            out = self.indexer(hidden, qr, positions, self.rotation)
        assert out is self.buffer
        return self.handed[-1]
