"""The quantization config: which checkpoint this is, and which method each of its layers gets."""

from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.platforms import current_platform

from vllm_fp4_plugin import (
    ahead,
    checkpoint_files,
    checkpoint_format,
    fused_mlp,
    ignore,
    norm,
    rotary,
)
from vllm_fp4_plugin.attention import choice
from vllm_fp4_plugin.checkpoint_format import CheckpointFormat, UnsupportedCheckpoint
from vllm_fp4_plugin.linear import Nvfp4LinearBase, Nvfp4LinearMethod
from vllm_fp4_plugin.linear_op import Activation
from vllm_fp4_plugin.online import Nvfp4OnlineLinearMethod
from vllm_fp4_plugin.options import KEY, METHOD, InvalidOption, Options
from vllm_fp4_plugin.report import LayerRecord, Report

# vLLM's handlers hang on its own logger, so that messages appear among its start-up lines.
logger = init_logger("vllm.nvfp4_tc")


class Nvfp4TcConfig(QuantizationConfig):
    """``--quantization nvfp4-tc``.

    Args:
        checkpoint: format of an NVFP4 checkpoint; None for a 16-bit one, to be quantised at load.
    """

    def __init__(self, checkpoint: CheckpointFormat | None = None) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._options: Options | None = None
        self._ignore = checkpoint.ignore if checkpoint is not None else ()
        self._targets = checkpoint.targets if checkpoint is not None else None
        self._asked_for: list[str] = []
        self._waiting: set[str] = set()
        self._products: set[ahead.Product] = set()
        self._max_tokens = 0
        self._attention_reason = ""
        self.report = Report()
        # vLLM reads this name: with a scheme, "auto" KV-cache dtype means fp8.
        self.kv_cache_scheme = checkpoint.kv_cache_scheme if checkpoint is not None else None

    @property
    def checkpoint(self) -> CheckpointFormat:
        """Format of the NVFP4 checkpoint; only for layers that come from one."""
        assert self._checkpoint is not None
        return self._checkpoint

    @property
    def options(self) -> Options:
        """The user's options; read when the first layer is built, as vLLM's config is set then."""
        if self._options is None:
            self._options = Options.of(get_current_vllm_config())
            online_only = self._options.changed_online_options()
            if self._checkpoint is not None and online_only:
                raise InvalidOption(
                    f"{KEY}.{online_only[0]}: is set, but the checkpoint is quantised already and "
                    "is served as it is; leave the option out, or serve the 16-bit checkpoint"
                )
            if self._options.fuse_mlp:
                fused_mlp.enable()
            self._attention_reason = choice.make_default(get_current_vllm_config())
            self._choose_small_kernels(self._options.small_kernels)
        return self._options

    def _choose_small_kernels(self, switched_on: bool) -> None:
        """Of what runs between products; recorded where there is a choice."""
        for record in (
            norm.make_default(get_current_vllm_config(), switched_on),
            rotary.make_default(switched_on),
        ):
            if record is not None:
                self.report.add(record)

    # --- what vLLM asks about the method --------------------------------------------------

    def get_name(self) -> str:
        """The method's name."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of activations outside the kernels."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """No bound here: each layer asks the kernel tables, which say what there is."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: vLLM puts ``hf_quant_config.json`` into the model's config by itself."""
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Take an NVFP4 checkpoint when asked to, and unasked on CPU, where only we can run it."""
        if user_quant == METHOD:
            checkpoint_format.parse(hf_quant_cfg)  # refuses, by name, what we cannot serve
            return METHOD
        if (
            user_quant is None
            and current_platform.is_cpu()
            and checkpoint_format.is_nvfp4(hf_quant_cfg)
        ):
            return METHOD
        return None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Nvfp4TcConfig":
        """From a checkpoint's quantization config."""
        return cls(checkpoint_format.parse(config))

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Check a local checkpoint's files before any process starts to load them."""
        directory = Path(model_name)
        if not directory.is_dir():
            return
        headers = checkpoint_files.read_headers(directory)
        if self._checkpoint is not None and headers:
            checkpoint_files.check_nvfp4(headers, self._checkpoint)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename ignore and target patterns as vLLM renames the model's modules."""
        # A regex is written against the checkpoint's names and no prefix rule can rename it.
        self._ignore = _mapped(self._ignore, hf_to_vllm_mapper)
        if self._targets is not None:
            self._targets = _mapped(self._targets, hf_to_vllm_mapper)

    # --- methods for layers ---------------------------------------------------------------

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method for a layer; None leaves it to vLLM."""
        # Before any activation is built, which fusing replaces, and any attention.
        _ = self.options
        self._asked_for.append(prefix)
        if isinstance(layer, Attention | MLAAttention):
            self.report.add(choice.record(layer, prefix, self._attention_reason))
            return BaseKVCacheMethod(self)
        if isinstance(layer, RoutedExperts):
            self._check_experts(prefix)
            return None
        if not isinstance(layer, LinearBase):
            return None
        reason = self._unquantized_reason(prefix)
        if reason is not None:
            self._record_unquantized(layer, prefix, reason)
            return UnquantizedLinearMethod()
        return self._linear_method(prefix)

    def _linear_method(self, prefix: str) -> Nvfp4LinearBase:
        self._waiting.add(prefix)
        if self._checkpoint is None:
            return Nvfp4OnlineLinearMethod(self, prefix, self.options.activation)
        activation: Activation = "16-bit" if self._checkpoint.weight_only else "static"
        return Nvfp4LinearMethod(self, prefix, activation)

    def _check_experts(self, prefix: str) -> None:
        if self._checkpoint is not None and self._unquantized_reason(prefix) is None:
            raise UnsupportedCheckpoint(
                f"{prefix}: holds quantised experts, nvfp4-tc serves dense layers; "
                "serve the model with --quantization modelopt_fp4 or compressed-tensors"
            )
        self.report.add(_unquantized(prefix, "nvfp4-tc serves dense layers", 0, 0))

    def _unquantized_reason(self, prefix: str) -> str | None:
        patterns = self._ignore if self._checkpoint is not None else self.options.ignore
        pattern = ignore.covered(prefix, patterns, self.packed_modules_mapping)
        if pattern is not None:
            return f"ignored by {pattern!r}"
        if self._targets is not None:
            target = ignore.covered(prefix, self._targets, self.packed_modules_mapping)
            return None if target is not None else "no target of the checkpoint"
        return None

    def idle_patterns(self) -> list[str]:
        """Of the user's ``ignore``, what covers no layer that was built here."""
        names = [
            name
            for prefix in self._asked_for
            for name in (prefix, *ignore.shard_names(prefix, self.packed_modules_mapping))
        ]
        patterns = self._options.ignore if self._options is not None else ()
        return [p for p in patterns if all(ignore.matches(n, [p]) is None for n in names)]

    def _record_unquantized(self, layer: LinearBase, prefix: str, reason: str) -> None:
        n = sum(getattr(layer, "output_partition_sizes", [layer.output_size]))
        elements = n * getattr(layer, "input_size_per_partition", layer.input_size)
        size = elements * layer.params_dtype.itemsize
        self.report.add(_unquantized(prefix, reason, elements, size))

    def expect(self, product: ahead.Product | None) -> None:
        """Note a product whose kernels are to be there before requests come."""
        if product is not None:
            self._products.add(product)
            self._max_tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens

    def layer_ready(self, prefix: str, device: torch.device) -> None:
        """Note that a layer's weights are in place; after the last one, log the report.

        Kernels are compiled then.
        """
        self._waiting.discard(prefix)
        if self._waiting:
            return
        lines, rank = self.report.lines(), get_tensor_model_parallel_rank()
        if self._products and ahead.is_wanted(device):
            lines.append(ahead.compile_products(self._products, self._max_tokens, device))
        if rank == 0:
            for line in filter(None, lines):
                logger.info("%s: %s", METHOD, line)
            for pattern in self.idle_patterns():
                logger.warning("%s", idle(pattern))


def idle(pattern: str) -> str:
    """What to say of one that covers nothing."""
    return (
        f"{KEY}.ignore: {pattern!r} covers no layer of this process; name modules as the report "
        "does, or their shards (q_proj)"
    )


def _unquantized(prefix: str, reason: str, elements: int, weight_bytes: int) -> LayerRecord:
    return LayerRecord(prefix, "unquantized (vLLM)", "16-bit", reason, elements, weight_bytes)


def _mapped(patterns: tuple[str, ...], mapper: Any) -> tuple[str, ...]:
    names = [p for p in patterns if not p.startswith("re:")]
    regexes = [p for p in patterns if p.startswith("re:")]
    return (*mapper.apply_list(names), *regexes)
