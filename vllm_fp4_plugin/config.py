"""vLLM's interface to ``nvfp4-tc``: the accepted checkpoints, and the method of each layer."""

from collections.abc import Mapping
from copy import copy, deepcopy
from typing import Any, Self

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    ReplicatedLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.platforms import current_platform

from vllm_fp4_plugin import batch_invariance, defaults, formats, model_demands
from vllm_fp4_plugin.arithmetic.requested_terms import OPTION, RequestedTerms, requested_terms
from vllm_fp4_plugin.attention import cache_scales, choice
from vllm_fp4_plugin.checkpoint import draft_names
from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.checkpoint import values as checkpoint_values
from vllm_fp4_plugin.checkpoint.layer_kinds import LayerKinds
from vllm_fp4_plugin.delegated.choice import choose as choose_delegated
from vllm_fp4_plugin.experts import choice as experts
from vllm_fp4_plugin.experts.record import unquantized
from vllm_fp4_plugin.formats import CheckpointConfig, UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.ignore import covered, shard_names
from vllm_fp4_plugin.linear import lm_head, ngram_table
from vllm_fp4_plugin.linear.embedding import Nvfp4EmbeddingMethod
from vllm_fp4_plugin.linear.lm_head import Nvfp4HeadMethod
from vllm_fp4_plugin.linear.online import Nvfp4OnlineLinearMethod
from vllm_fp4_plugin.linear.stored import Nvfp4LinearMethod
from vllm_fp4_plugin.options import METHOD, Options
from vllm_fp4_plugin.startup import NVFP4_LINEAR, Startup

# Linears of a mixture of experts that score experts; every exporter leaves these in 16 bits.
_ROUTERS = ("gate", "router", "shared_expert_gate")


class Nvfp4TcConfig(QuantizationConfig):
    """Quantization config of ``--quantization nvfp4-tc``.

    Args:
        checkpoint: content of the quantization config of an NVFP4 or mixed-precision checkpoint;
            None for a 16-bit checkpoint, which is quantised at load.

    Attributes:
        startup: record of the process's layers.
    """

    def __init__(self, checkpoint: CheckpointConfig | None = None) -> None:
        super().__init__()
        self.startup = Startup()
        self._checkpoint = checkpoint
        self._kinds = None if checkpoint is None else LayerKinds(checkpoint)
        self._is_draft = False
        self._options: Options | None = None
        self._attention_config: Any = None  # current when the backend was chosen
        self._attention_reason = ""
        self._attention_reasons: dict[str, str] = {}  # by layer name
        # vLLM reads this attribute: with a scheme, KV-cache dtype "auto" means fp8.
        self.kv_cache_scheme = checkpoint.kv_cache_scheme if checkpoint is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the config for a draft model: names are mapped separately, ``startup`` is shared."""
        copied = copy(self)
        copied._kinds = deepcopy(self._kinds, memo)
        copied.packed_modules_mapping = deepcopy(self.packed_modules_mapping, memo)
        return copied

    @property
    def options(self) -> Options:
        """Options of the user, read when the first layer is built, once vLLM's config is set.

        The first access also refuses unsupported engines and chooses default kernels.
        """
        if self._options is None:
            config = get_current_vllm_config()
            batch_invariance.refuse(config)
            model_demands.check_experts(config)
            options = self._options = Options.of(config)
            if self._checkpoint is not None:
                options.refuse_online_only()
            self.startup.expect_match("ignore", options.ignore)
            self.startup.expect_match(OPTION, options.terms_patterns, NVFP4_LINEAR)
            self._attention_config = config.attention_config
            self._attention_reason = defaults.choose(config, options, self.startup.report)
        return self._options

    # --- vLLM's queries about the method --------------------------------------------------

    def get_name(self) -> str:
        """Name of the method."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes in which vLLM may run a model with this method."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Minimum compute capability: 0, as each layer looks up its device in the kernel tables."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Extra config files: none; vLLM merges ``hf_quant_config.json`` into the config itself."""
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Claim a checkpoint on request; an NVFP4 checkpoint on a CPU also if nothing is requested.

        No other method of vLLM serves NVFP4 on a CPU.
        """
        if user_quant == METHOD:
            formats.parse(hf_quant_cfg)  # raises for configs that we cannot serve
            return METHOD
        if user_quant is None and current_platform.is_cpu() and formats.is_nvfp4(hf_quant_cfg):
            return METHOD
        return None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Nvfp4TcConfig":
        """Build this config from a checkpoint's quantization config."""
        return cls(formats.parse(config))

    @property
    def checkpoint(self) -> CheckpointConfig | None:
        """Content of the checkpoint's quantization config; None for a 16-bit checkpoint."""
        return self._checkpoint

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Check the model and a local checkpoint's files before any process loads weights.

        The schemes of a quantised checkpoint's layers are then known from the tensors' headers.
        """
        model_demands.check(hf_config)
        self._is_draft = draft_names.is_draft(hf_config)
        directory = checkpoint_files.local_directory(model_name, revision)
        if directory is None:
            return
        if self._checkpoint is not None and self._checkpoint.is_silent:
            self._checkpoint = formats.parse_beside(directory) or self._checkpoint
            self._kinds = LayerKinds(self._checkpoint)
        headers = checkpoint_files.read_headers(directory)
        ngram_table.check(headers, hf_config)
        if self._checkpoint is not None and headers:
            checkpoint_files.check_nvfp4(headers, self._checkpoint)
            checkpoint_values.check_global_scales(headers, self._checkpoint)
        if self._kinds is not None and headers:
            self._kinds.read(headers)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename modules and patterns of the checkpoint as vLLM renames the model's modules."""
        if self._kinds is not None:
            self._kinds.rename(hf_to_vllm_mapper)

    def get_cache_scale_mapper(self) -> Any:  # static in vLLM's class, but called on an instance
        """Mapper of checkpoint names of KV-cache scales; see ``cache_scales.mapper``."""
        return cache_scales.mapper(super().get_cache_scale_mapper(), self._checkpoint)

    def has_blocked_weights(self) -> bool:
        """Whether a layer has FP8 blocks, for which vLLM enables its custom op ``quant_fp8``."""
        return self._kinds is not None and self._kinds.has(Kind.FP8_BLOCK)

    # --- methods for layers ---------------------------------------------------------------

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Method of a layer; None leaves it to vLLM."""
        if type(layer) is LinearBase:
            return self._probed(layer, prefix)
        # Must precede construction of activations (fusion replaces their class) and attention.
        options = self.options
        startup = self.startup
        startup.register(prefix, shard_names(prefix, self.packed_modules_mapping))
        if isinstance(layer, Attention | MLAAttention):
            batch_invariance.check_attention(prefix, layer)
            startup.report.add(choice.record(layer, prefix, self._reason_for_attention(prefix)))
            return cache_scales.KvCacheMethod(self)
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix)
        if isinstance(layer, ParallelLMHead):
            return self._head_method(layer, prefix)
        if not isinstance(layer, LinearBase):
            return self._lookup_method(layer, prefix)
        if self._checkpoint is None:
            return self._online_method(layer, prefix, options)
        return self._checkpoint_method(layer, prefix, options, self._checkpoint)

    def _probed(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """Method of a layer that a model builds only to read the method, and never runs.

        The layer is not recorded. vLLM's Step 5 model builds such layers to find out whether two
        projections are unquantised and may be fused.
        """
        apart = copy(self)
        apart.startup = Startup()
        if self._checkpoint is None:
            return apart._online_method(layer, prefix, self.options)
        return apart._checkpoint_method(layer, prefix, self.options, self._checkpoint)

    def _reason_for_attention(self, prefix: str) -> str:
        """Reason for an attention layer's backend.

        vLLM asks for a layer's method when it builds the layer, and a second time later. The second
        time, the current config is the target's even for a draft's layer, so the first reason is
        kept.
        """
        attention = get_current_vllm_config().attention_config
        if attention is self._attention_config:
            reason = self._attention_reason
        else:
            reason = choice.drafts_reason(attention)
        if cache_scales.are_ignored(self._checkpoint):
            reason = f"{reason}; {cache_scales.IGNORED}"
        return self._attention_reasons.setdefault(prefix, reason)

    def _online_method(self, layer: Any, prefix: str, options: Options) -> QuantizeMethodBase:
        pattern = covered(prefix, options.ignore, self.packed_modules_mapping)
        if pattern is not None:
            self.startup.unquantized(layer, prefix, f"ignored by {pattern!r}")
            return UnquantizedLinearMethod()
        if isinstance(layer, ReplicatedLinear) and prefix.rpartition(".")[2] in _ROUTERS:
            self.startup.unquantized(layer, prefix, "routes to experts: 4 bits change the choice")
            return UnquantizedLinearMethod()
        if model_demands.is_plain(layer):
            self.startup.unquantized(layer, prefix, "vLLM's model multiplies its weight itself")
            return UnquantizedLinearMethod()
        dtype = get_current_vllm_config().model_config.dtype
        if layer.params_dtype == torch.float32 != dtype:
            self.startup.unquantized(layer, prefix, "the model has it in float32")
            return UnquantizedLinearMethod()
        self.startup.pending.add(prefix)
        terms = self._terms(prefix, self.packed_modules_mapping)
        return Nvfp4OnlineLinearMethod(self.startup, options, prefix, terms)

    def _terms(self, prefix: str, packed: Mapping[str, list[str]]) -> RequestedTerms | None:
        """Number of terms that the user requested for a layer's activations; None: no request.

        ``packed``: as ``packed_modules`` of ``shard_names``.
        """
        self.startup.register(prefix, shard_names(prefix, packed), NVFP4_LINEAR)
        return requested_terms(self.options.activation_terms, prefix, packed)

    def _checkpoint_method(
        self, layer: Any, prefix: str, options: Options, checkpoint: CheckpointConfig
    ) -> QuantizeMethodBase:
        assert self._kinds is not None
        startup, packed = self.startup, self.packed_modules_mapping
        name = self._on_disk(prefix, self._kinds)
        if self._is_draft:
            packed = packed or draft_names.PACKED
        group, reason = self._kinds.of(name, packed)
        if group.kind is Kind.UNQUANTIZED:
            startup.unquantized(layer, prefix, reason)
            return UnquantizedLinearMethod()
        if model_demands.is_plain(layer):
            raise model_demands.not_plain(prefix, group.kind)
        if not group.kind.is_nvfp4:
            batch_invariance.check_format(prefix, group.kind)
            method, record = choose_delegated(
                layer, prefix, group, checkpoint.format, packed, reason
            )
            startup.report.add(record)
            return method
        startup.pending.add(prefix)
        weight_only = group.kind is Kind.NVFP4_A16
        return Nvfp4LinearMethod(
            startup, options, prefix, checkpoint, weight_only=weight_only, reason=reason,
            terms=self._terms(prefix, packed),
        )  # fmt: skip

    def _on_disk(self, prefix: str, kinds: LayerKinds) -> str:
        """Name of a layer in the checkpoint, which for a draft model may differ from ``prefix``."""
        speculative: Any = get_current_vllm_config().speculative_config
        if not self._is_draft or speculative is None:
            return prefix
        layers = speculative.target_model_config.get_total_num_hidden_layers()
        return draft_names.on_disk(prefix, layers, kinds.has_beside)

    def _head_method(self, layer: ParallelLMHead, prefix: str) -> QuantizeMethodBase | None:
        """Method of an ``lm_head``; None for a head in 16 bits, or tied and without own tensors."""
        checkpoint, kinds = self._checkpoint, self._kinds
        if checkpoint is None or kinds is None:
            return None
        group = kinds.head_group(prefix)
        if group is None and not lm_head.is_tied() and not kinds.are_by_tensors:
            group = kinds.of(prefix, {}).group
        if group is None or group.kind is Kind.UNQUANTIZED:
            return None
        lm_head.check(prefix, group.kind)
        if not group.kind.is_nvfp4:
            batch_invariance.check_format(prefix, group.kind)
            method, record = choose_delegated(layer, prefix, group, checkpoint.format, {}, "")
            self.startup.report.add(record)
            return method
        self.startup.pending.add(prefix)
        weight_only = group.kind is Kind.NVFP4_A16
        return Nvfp4HeadMethod(
            self.startup, self.options, prefix, checkpoint, weight_only=weight_only, reason="",
            terms=self._terms(prefix, {}),
        )  # fmt: skip

    def _experts_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """Method of a layer of experts; None if vLLM serves the experts in 16 bits."""
        batch_invariance.check_experts(prefix)
        checkpoint, kinds = self._checkpoint, self._kinds
        if checkpoint is None or kinds is None:
            terms = self._terms(prefix, {})
            return experts.choose_online(layer, prefix, self.options, self.startup, terms)
        count, parts = layer.moe_config.num_logical_experts, experts.projections(layer)
        group, reason = kinds.of_experts(self._on_disk(prefix, kinds), count, parts)
        if group.kind is Kind.UNQUANTIZED:
            self.startup.report.add(unquantized(layer, prefix, reason))
            return None
        terms = self._terms(prefix, {}) if group.kind.is_nvfp4 else None
        return experts.choose(
            layer, prefix, group, checkpoint, self.options, self.startup, reason, terms
        )

    def _lookup_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Method of an embedding; None for any layer in 16 bits.

        Raises:
            UnsupportedCheckpoint: the checkpoint quantises an embedding to another format than
                NVFP4, or a layer that is neither an embedding nor linear.
        """
        if self._checkpoint is None or self._kinds is None:
            return None
        is_embedding = isinstance(layer, VocabParallelEmbedding)
        if is_embedding:
            prefix = self._kinds.embedding_name(prefix)
        kind = self._kinds.tensors_kind(prefix)
        if kind is None or kind is Kind.UNQUANTIZED:
            return None
        if is_embedding and kind.is_nvfp4:
            self.startup.pending.add(prefix)
            return Nvfp4EmbeddingMethod(self.startup, prefix, self._checkpoint)
        raise UnsupportedCheckpoint(
            f"{prefix}: is {kind}, must be in 16 bits, or in NVFP4 if it is an embedding; quantise "
            f"the model with {prefix.rpartition('.')[2]} excluded"
        )
