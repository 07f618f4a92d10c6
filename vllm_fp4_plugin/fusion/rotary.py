"""vLLM's rotary embeddings on our kernel: queries and keys in one launch, with PDL.

Each vLLM class that differs only in its cos/sin table has a subclass of ours, which vLLM builds
instead.
"""

from typing import Any

from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import rotary_embedding as theirs

from nvfp4_kernels import rotary_embedding
from nvfp4_kernels.dispatch import Kernel
from nvfp4_kernels.rotary.kernels import DTYPES, KERNELS
from nvfp4_kernels.rotary.tile import MAX_HEAD_DIM, PIECE
from vllm_fp4_plugin.device import current_device
from vllm_fp4_plugin.options import METHOD, NORM_ROPE_KERNELS_OFF, Options
from vllm_fp4_plugin.report import LayerRecord

NAME = "rotary_emb"


class RotaryOnOurKernel(theirs.RotaryEmbedding):
    """Mixin that runs a rotary embedding class of vLLM on our kernel.

    Attributes:
        ours: whether our kernel rotates; False: vLLM's code does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, kernel = get_current_vllm_config(), _kernel()
        self.ours = False
        if kernel is not None and self._in_our_engine(config):
            reason = self.unsupported_reason()
            self.ours = not reason
            label = kernel.label if self.ours else "vLLM"
            config.quant_config.startup.report.add(LayerRecord(NAME, label, "16-bit", reason, 0, 0))

    def unsupported_reason(self) -> str:
        """Reason why our kernel cannot rotate the heads of this embedding; empty if it can."""
        if not self.is_neox_style:
            return "it turns neighbouring elements together"
        if self.dtype not in DTYPES:
            return f"its dtype is {str(self.dtype).removeprefix('torch.')}"
        if self.head_size % PIECE or self.head_size > MAX_HEAD_DIM or self.rotary_dim % (2 * PIECE):
            return f"it turns {self.rotary_dim} elements of heads of {self.head_size}"
        return ""

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """See ``RotaryEmbedding.forward_native``; shapes are kept."""
        if not self.ours or key is None or query.dtype != self.dtype:
            return super().forward(positions, query, key, *args, **kwargs)
        tokens = positions.numel()
        q, k = (x.view(tokens, -1, self.head_size) for x in (query, key))
        cache = self._match_cos_sin_cache_dtype(query)
        q, k = rotary_embedding(positions.view(-1), q, k, cache)
        return q.view(query.shape), k.view(key.shape)

    @staticmethod
    def _in_our_engine(config: VllmConfig) -> bool:
        """Whether our quantization method serves the engine, and the user enables our kernel."""
        quantization = config.quant_config
        ours = quantization is not None and quantization.get_name() == METHOD
        return ours and Options.of(config).norm_rope_kernels


REPLACED = (
    theirs.RotaryEmbedding,
    theirs.DynamicNTKScalingRotaryEmbedding,
    theirs.LinearScalingRotaryEmbedding,
    theirs.Llama3RotaryEmbedding,
    theirs.NTKScalingRotaryEmbedding,
    theirs.YaRNScalingRotaryEmbedding,
)


def is_rotary(module: Any) -> bool:
    """Whether a module is one of vLLM's rotary embeddings, of any class."""
    package = f"{theirs.__name__}."
    classes = type(module).__mro__
    return hasattr(module, "head_size") and any(c.__module__.startswith(package) for c in classes)


def make_default(switched_on: bool) -> LayerRecord | None:
    """Replace vLLM's rotary classes with ours for models built from now on.

    Args:
        switched_on: the user's option ``norm_rope_kernels``.

    Returns:
        Record that vLLM rotates queries and keys, if our kernel is switched off; else None.
    """
    if _kernel() is None:
        return None
    # vLLM caches its embeddings, and would reuse one in an engine with another choice.
    theirs._ROPE_DICT.clear()
    if not switched_on:
        return LayerRecord(NAME, "vLLM", "16-bit", NORM_ROPE_KERNELS_OFF, 0, 0)
    for each in REPLACED:
        if each.__name__ not in op_registry_oot:
            ours: Any = type(f"{each.__name__}OnOurKernel", (RotaryOnOurKernel, each), {})
            each.register_oot(ours)
            # Registration renames the class; custom_ops directives use the original name.
            ours.name = each.name
    return None


def _kernel() -> Kernel | None:
    kernel = KERNELS.find(current_device(), "float")
    return None if kernel is None or kernel.arch == "cpu" else kernel
