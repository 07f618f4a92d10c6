"""Self-check of attention that rotates and normalises queries and keys, or quantises its result.

The module around attention runs a prefill and then a decode step, with its own pages of KV cache;
keys in the pages are compared too. The softmax scale is replaced, so that queries matter: with the
model's scale, attention of random inputs may nearly average the values, whether queries are rotated
or not.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

from nvfp4_kernels.attention.kernels import MAX_ROTARY_ROWS
from vllm_fp4_plugin.attention import cache
from vllm_fp4_plugin.attention.impl import PagedAttentionImpl
from vllm_fp4_plugin.attention.metadata import PagedAttentionMetadata, Part
from vllm_fp4_plugin.fusion import attention_quantize, match_rotary
from vllm_fp4_plugin.fusion.match_all_reduce import RESIDUAL
from vllm_fp4_plugin.fusion.match_positions import POSITIONS
from vllm_fp4_plugin.fusion.module_constants import constants_of
from vllm_fp4_plugin.fusion.self_check.neighbourhood import Neighbourhood, plain, random_input

_POSITIONS = (POSITIONS, "position_ids")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SHARPNESS = 2.0  # target standard deviation of the logits


def neighbourhoods(model: Module, config: Any) -> Iterator[Neighbourhood]:
    """Attention layers of a model that are fused with rotation or quantization."""
    for prefix, owner in model.named_modules():
        for name, module in owner._modules.items():
            if isinstance(module, Attention) and type(module.impl) is PagedAttentionImpl:
                impl = module.impl
                if impl.rotation is not None or impl.quantizes:
                    yield _neighbourhood(f"{prefix}.{name}", _Trial(owner, name, config))


def _neighbourhood(name: str, trial: "_Trial") -> Neighbourhood:
    owner, impl = trial.owner, trial.impl
    rotation = impl.rotation
    rotary = None if rotation is None else (type(rotation.rotary), rotation.rotary.rotary_dim)
    sizes = impl.sizes, impl.soft_cap, impl.scale, impl.kv_cache_dtype
    kind = "attention", type(owner), constants_of(owner), impl.note, rotary, *sizes
    return Neighbourhood(f"{name} ({impl.note})", kind, trial.results, trial.separate)


class _Trial:
    """Runs of a module that holds attention, fused and unfused.

    Args:
        owner: the module.
        name: name of the attention in ``owner``.
        config: config of the engine.
    """

    def __init__(self, owner: Any, name: str, config: Any) -> None:
        self.owner = owner
        self.name = name
        self.config = config
        self.attention: Any = owner._modules[name]
        self.impl: Any = self.attention.impl
        self._scale: float | None = None  # softmax scale
        # Enough tokens that a separate op stores keys, and more than a page is filled.
        group = self.impl.num_heads // self.impl.num_kv_heads
        most = config.model_config.max_model_len - 1
        self._prefill = min(MAX_ROTARY_ROWS // group + 1, most)

    def separate(self) -> Any:
        """Undo the fusions of rotation and quantization; return a function that restores them."""
        undone = [
            match_rotary.unbind(self.owner, self.name),
            attention_quantize.take_back(self.attention),
        ]
        return lambda: [each() for each in undone]

    def results(self, fused: bool) -> Sequence[Tensor]:
        """Results of a prefill and of a decode step, and the keys in the pages.

        The unfused run must come first, as it determines the softmax scale.
        """
        if fused:
            assert self._scale is not None
            return self._run(self._scale)
        undo = self.separate()
        try:
            if self._scale is None:
                self._scale = self._sharp_scale()
            return self._run(self._scale)
        finally:
            undo()

    def _sharp_scale(self) -> float:
        """Softmax scale at which logits of random inputs have standard deviation ``_SHARPNESS``.

        The layer's own scale if unscaled logits are constant or not finite.
        """
        seen: list[tuple[Tensor, Tensor]] = []
        attend = self.impl.attend

        def noted(layer: Any, query: Tensor, key: Tensor, *more: Any, **named: Any) -> None:
            seen.append((query.float(), key.float()))
            attend(layer, query, key, *more, **named)

        self.impl.attend = noted
        try:
            self._run(self.impl.scale)
        finally:
            del self.impl.attend
        (query, key), *_ = seen
        per_key = query.shape[1] // key.shape[1]
        logits = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(per_key, 1))
        spread = float(logits.std())
        return _SHARPNESS / spread if 0 < spread < float("inf") else self.impl.scale

    def _run(self, scale: float) -> list[Tensor]:
        page_size, own_scale = self.config.cache_config.block_size or 16, self.impl.scale
        layer = self._first_layer()
        hidden = random_input(layer, self._prefill + 1)
        pages = -(-(self._prefill + 1) // page_size)
        heads = self.impl.num_kv_heads
        dtype = torch.uint8 if self.impl.is_fp8 else hidden.dtype
        shape = pages, heads, page_size, 2 * self.impl.head_size
        kv_cache = torch.zeros(shape, dtype=dtype, device=hidden.device)
        kept, self.attention.kv_cache, self.impl.scale = self.attention.kv_cache, kv_cache, scale
        try:
            outs = [
                self._step(hidden, first, end, page_size)
                for first, end in ((0, self._prefill), (self._prefill, self._prefill + 1))
            ]
        finally:
            self.attention.kv_cache, self.impl.scale = kept, own_scale
        values = cache.typed(kv_cache, fp8=self.impl.is_fp8).float()
        return [*outs, values[..., : self.impl.head_size]]

    def _first_layer(self) -> Any:
        """First linear layer that is not row-parallel, taken to be the one that reads the input.

        Raises:
            TypeError: there is no such layer.
        """
        for layer in self.owner._modules.values():
            if isinstance(layer, LinearBase) and not isinstance(layer, RowParallelLinear):
                return layer
        raise TypeError(f"{type(self.owner).__name__} projects nothing")

    def _step(self, hidden: Tensor, first: int, end: int, page_size: int) -> Tensor:
        here = hidden.device
        positions = torch.arange(first, end, device=here)
        table = torch.arange(-(-end // page_size), dtype=torch.int32, device=here)
        part = Part(
            tokens=slice(0, end - first),
            query_start=torch.tensor([0, end - first], dtype=torch.int32, device=here),
            seq_lens=torch.tensor([end], dtype=torch.int32, device=here),
            block_table=table.unsqueeze(0),
            max_query_len=end - first,
            max_seq_len=end,
        )
        counters = torch.zeros(self.impl.num_kv_heads, dtype=torch.int32, device=here)
        metadata = PagedAttentionMetadata([part], positions, counters, positions)
        named = {self.attention.layer_name: metadata}
        given = self._arguments(hidden[first:end], positions)
        with _context(self.config, named, {self.attention.layer_name: positions}):
            return plain(self.owner.forward(**given)).clone()

    def _arguments(self, hidden: Tensor, positions: Tensor) -> dict[str, Tensor | None]:
        """Arguments of the module's forward: the input, positions, and None for the residual.

        Raises:
            TypeError: the forward pass requires no input, or further arguments.
        """
        parameters = list(inspect.signature(type(self.owner).forward).parameters.values())[1:]
        needed = [p.name for p in parameters if p.default is p.empty and p.kind in _NAMED]
        known: dict[str, Tensor | None] = dict.fromkeys(_POSITIONS, positions)
        known[RESIDUAL] = None
        others = [name for name in needed if name not in known]
        if len(others) != 1:
            raise TypeError(f"{type(self.owner).__name__}.forward takes {', '.join(needed)}")
        return {name: known.get(name, hidden) for name in needed}


@contextmanager
def _context(config: Any, metadata: Any, slots: Any) -> Iterator[None]:
    """Forward context as in a step of vLLM's runner, with the fields that attention reads."""
    with override_forward_context(create_forward_context(metadata, config, slot_mapping=slots)):
        yield
