"""NVFP4 kernels for torch: the number format, and ops on it. Independent of vLLM.

Public names are imported at first use, so that the command line prints its help without importing
torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvfp4_kernels.attention import *
    from nvfp4_kernels.checks import InvalidArgument as InvalidArgument
    from nvfp4_kernels.dispatch import NoKernelError as NoKernelError
    from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor as Nvfp4Tensor
    from nvfp4_kernels.formats.output import PerToken as PerToken
    from nvfp4_kernels.formats.output import PerTokenFp8 as PerTokenFp8
    from nvfp4_kernels.formats.output import Static as Static
    from nvfp4_kernels.formats.output import StaticFp8 as StaticFp8
    from nvfp4_kernels.gemm import *
    from nvfp4_kernels.indexer import *
    from nvfp4_kernels.moe import *
    from nvfp4_kernels.norm import *
    from nvfp4_kernels.quantize import *
    from nvfp4_kernels.rotary import *

# Public names by the module that has them.
_NAMES = {
    "attention": (
        "HeadRotation",
        "attention",
        "decode_attention",
        "merge_segments",
        "paged_attention",
        "rotary_attention",
        "sparse_attention",
    ),
    "gemm": ("gemm", "gemv", "grouped_gemm", "grouped_silu_mul_gemm", "silu_mul_gemm"),
    "indexer": (
        "IndexerKeys",
        "IndexerPagedKeys",
        "indexer_gather_k",
        "indexer_logits",
        "indexer_quantize_q",
        "indexer_score_topk",
        "indexer_store_k",
        "indexer_topk",
    ),
    "moe": (
        "Dispatched",
        "Ids",
        "Logits",
        "Router",
        "Routing",
        "moe_combine",
        "moe_dispatch",
        "moe_route",
        "moe_topk",
    ),
    "norm": ("add_rms_norm",),
    "quantize": (
        "add_rms_norm_quantize",
        "quantize",
        "rms_norm_quantize",
        "silu_mul_quantize",
    ),
    "rotary": (
        "rotary_embedding",
        "rotary_store",
    ),
    "checks": ("InvalidArgument",),
    "dispatch": ("NoKernelError",),
    "formats.nvfp4": ("Nvfp4Tensor",),
    "formats.output": ("PerToken", "PerTokenFp8", "Static", "StaticFp8"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)


class _Package(ModuleType):
    """Class of this package's module: a name shared by an op and a subpackage refers to the op.

    Importing the subpackage ``nvfp4_kernels.gemm`` would otherwise replace the op ``gemm``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _MODULES):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{self.__name__}.{_MODULES[name]}"), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
