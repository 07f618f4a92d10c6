"""Method of a layer of experts whose checkpoint holds NVFP4 weights."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.config import get_current_vllm_config

from nvfp4_kernels.formats.nvfp4 import GLOBAL_RANGE
from vllm_fp4_plugin import kernel_weight
from vllm_fp4_plugin.arithmetic.requested_terms import RequestedTerms
from vllm_fp4_plugin.experts.base import ExpertsMethod
from vllm_fp4_plugin.experts.ledger import BIAS, BIAS_FORM, ExpertLedger, nvfp4_forms
from vllm_fp4_plugin.experts.stacks import DOWN
from vllm_fp4_plugin.experts.weights import StoredExperts
from vllm_fp4_plugin.formats import CheckpointConfig
from vllm_fp4_plugin.options import Activation, Options
from vllm_fp4_plugin.startup import Startup


class Nvfp4ExpertsMethod(ExpertsMethod):
    """Method of a layer of experts whose checkpoint holds NVFP4 weights.

    Args:
        startup: see the base class.
        options: options of the user.
        layer: vLLM's layer of routed experts.
        prefix: name of the layer.
        checkpoint: content of the checkpoint's config.
        weight_only: whether the checkpoint leaves activations in 16 bits.
        terms: see the base class.

    Raises:
        UnsupportedCheckpoint, NoKernelError: see the base class.
    """

    def __init__(
        self,
        startup: Startup,
        options: Options,
        layer: Any,
        prefix: str,
        checkpoint: CheckpointConfig,
        *,
        weight_only: bool,
        terms: RequestedTerms | None = None,
    ) -> None:
        inputs: Activation = "16-bit" if weight_only else "static"
        super().__init__(startup, options, layer, prefix, inputs, terms)
        self.checkpoint = checkpoint
        self.weight_only = weight_only
        self.ledger = ExpertLedger(layer, prefix)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the tensors under vLLM's names: ``w13_`` or ``w2_``, then the name on disk.

        Biases have the model's dtype. gemm1's input scales are those of all ranks' experts.
        """
        names, e = self.checkpoint.names, num_experts
        h, i, s = hidden_size, intermediate_size_per_partition, len(self.ledger.shards)
        load = self.ledger.loader(self._load)
        for name, form in nvfp4_forms(names).items():
            # A checkpoint may contain unused input scales; they are read nevertheless.
            if not (name == names.input_global and self.weight_only):
                self.ledger.expect(name, form)
            columns_per = form.columns_per
            w13: tuple[int, ...] = (e, s)
            w2: tuple[int, ...] = (e,)
            if columns_per is not None:
                w13, w2 = (e, s, i, h // columns_per), (e, h, i // columns_per)
            elif name == names.input_global:
                w13 = (extra_weight_attrs["global_num_experts"], s)
            for part, shape in (("w13", w13), ("w2", w2)):
                data = torch.empty(shape, dtype=form.dtype)
                if columns_per is None:
                    data.fill_(torch.nan)  # NaN: an unloaded scale must not pass for a scale
                parameter = Parameter(data, requires_grad=False)
                parameter.weight_loader = load  # type: ignore[attr-defined]
                layer.register_parameter(f"{part}_{name}", parameter)
                if columns_per is None:
                    self.ledger.watch(part, name, parameter)
        if self.moe.has_bias:
            self.ledger.expect(BIAS, BIAS_FORM)
            for part, shape in (("w13", (e, s, i)), ("w2", (e, h))):
                data = torch.full(shape, torch.nan, dtype=params_dtype)
                parameter = Parameter(data, requires_grad=False)
                parameter.weight_loader = load  # type: ignore[attr-defined]
                layer.register_parameter(f"{part}_{BIAS}", parameter)
        self._locally = layer._map_global_expert_id_to_local_expert_id

    def _row(self, param: Tensor, name: str, shard_id: str, expert_id: int) -> int:
        everywhere = shard_id != DOWN and len(param) == self.moe.num_experts
        if everywhere and name.endswith(self.checkpoint.names.input_global):
            return expert_id  # inputs are quantised alike on every rank
        return super()._row(param, name, shard_id, expert_id)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check the loaded tensors, and convert them to the kernels' layout."""
        names = self.checkpoint.names
        if not hasattr(layer, f"w13_{names.weight_global}"):
            return  # converted already
        order = (names.weight, names.block_scale, names.weight_global, names.input_global)
        keys = [f"{part}_{name}" for part in ("w13", "w2") for name in order]
        keys += [f"{part}_{BIAS}" for part in ("w13", "w2") if self.moe.has_bias]
        loaded = {key: getattr(layer, key).data for key in keys}
        if get_current_vllm_config().load_config.load_format == "dummy":
            _fill_dummy(loaded.values())
        else:
            self.ledger.check_complete()
        for key in keys:
            delattr(layer, key)
        parts: dict[str, Tensor] = {}
        for part in ("w13", "w2"):
            data, scales, weight_global, input_global = (loaded[f"{part}_{n}"] for n in order)
            self._check_block_scales(part, scales, data)
            parts |= {part: data, f"{part}_scale": scales}
            parts[f"{part}_global"] = self._factors(part, names.weight_global, weight_global)
            if not self.weight_only:
                parts[f"{part}_input"] = self._factors(part, names.input_global, input_global)
        w13_input = None if self.weight_only else parts.pop("w13_input").max()
        w2_input = None if self.weight_only else parts.pop("w2_input")
        w13_bias, w2_bias = (loaded.get(f"{part}_{BIAS}") for part in ("w13", "w2"))
        self.install(
            layer,
            StoredExperts(
                **parts, w13_input=w13_input, w2_input=w2_input, w13_bias=w13_bias, w2_bias=w2_bias
            ),
        )

    def _shards(self, part: str) -> tuple[str, ...]:
        return self.ledger.shards if part == "w13" else (DOWN,)

    def _check_block_scales(self, part: str, scales: Tensor, data: Tensor) -> None:
        """Raise if an expert has invalid block scales; the error names the tensor."""
        if kernel_weight.are_block_scales(scales, data):
            return
        shards, name = self._shards(part), self.checkpoint.names.block_scale
        for row, each in enumerate(zip(scales, data, strict=True)):
            matrices = zip(
                shards, *(t.view(len(shards), -1, t.shape[-1]) for t in each), strict=True
            )
            for shard, *matrix in matrices:
                kernel_weight.check_block_scales(self.ledger.source(name, row, shard), *matrix)

    def _factors(self, part: str, name: str, stored: Tensor) -> Tensor:
        """Global scales as factors, from factors or divisors in the checkpoint; checks them."""
        if not kernel_weight.are_globals(stored):
            shards = self._shards(part)
            of_all = part == "w13" and name == self.checkpoint.names.input_global
            for row, values in enumerate(stored.view(len(stored), len(shards))):
                for shard, value in zip(shards, values, strict=True):
                    source = self.ledger.source(name, row, shard, of_all=of_all)
                    kernel_weight.check_globals(source, value)
        return stored.reciprocal() if self.checkpoint.format.reciprocal else stored


def _fill_dummy(tensors: Any) -> None:
    """Fill tensors for ``--load-format dummy``: vLLM's random values are no valid scales."""
    for tensor in tensors:
        if tensor.dtype == torch.uint8:
            tensor.random_(0, 256)
        elif tensor.dtype == torch.float32:
            tensor.fill_(1.0 / GLOBAL_RANGE)
        else:
            tensor.copy_(torch.ones_like(tensor, dtype=torch.float32))
