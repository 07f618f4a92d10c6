"""Attention implementation for each device family: the one table that all other modules read.

=======  ================================  ==========================================
family   steps of one token per sequence   other steps
=======  ================================  ==========================================
cpu      ``paged_attention`` (reference)   ``paged_attention`` (reference)
sm_90    ``decode_attention``              FlashAttention 3 (vLLM)
sm_100   ``paged_attention``               ``paged_attention``
=======  ================================  ==========================================
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nvfp4_kernels.attention.decode.kernels import DECODE_KERNELS, MAX_GROUP
from nvfp4_kernels.attention.decode.kernels import HEAD_DIMS as DECODE_HEAD_DIMS
from nvfp4_kernels.attention.kernels import HEAD_DIMS, PAGED_KERNELS
from nvfp4_kernels.devices import device_family
from nvfp4_kernels.dispatch import Kernel, KernelTable, Mode
from vllm_fp4_plugin import batch_invariance
from vllm_fp4_plugin.attention import hopper
from vllm_fp4_plugin.attention.cache import FP8_DTYPES
from vllm_fp4_plugin.attention.hopper import HopperAttentionImpl, HopperMetadataBuilder
from vllm_fp4_plugin.attention.impl import PagedAttentionImpl
from vllm_fp4_plugin.attention.metadata import PagedAttentionMetadataBuilder
from vllm_fp4_plugin.device import current_device

PAGE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Implementation:
    """Classes and kernels that run attention on a family of devices.

    Attributes:
        impl: class of a layer's attention.
        builder: class of the step's metadata builder.
        kernels: kernel table of the op that runs decodes and, if ``prefill`` is empty, prefills.
        head_dims: supported head sizes by device family and mode.
        sinks: whether layers may have attention sinks.
        default_head_sizes: head sizes with which layers are served without a request; None: all.
        fp8_by_default: whether layers with an E4M3 cache are served without a request.
        max_group: largest qhead_per_kvhead; None: any number.
        prefill: name, for reports, of the kernel for prefills; empty: a kernel of ``kernels``.
        unsupported_reason: function that returns the reason why this installation cannot run the
            implementation, or "".
    """

    impl: type[PagedAttentionImpl]
    builder: type[PagedAttentionMetadataBuilder]
    kernels: KernelTable
    head_dims: Mapping[tuple[str, Mode], tuple[int, ...]]
    sinks: bool = True
    default_head_sizes: tuple[int, ...] | None = None
    fp8_by_default: bool = True
    max_group: int | None = None
    prefill: str = ""
    unsupported_reason: Callable[[], str] = lambda: ""

    @property
    def batch_invariant(self) -> bool:
        """Whether this device has a batch-invariant kernel for a 16-bit KV cache."""
        return self.kernels.find(current_device(), "float", batch_invariant=True) is not None

    def kernel(self, kv_cache_dtype: str) -> Kernel:
        """Kernel for this device and cache dtype, batch-invariant if the user wants that.

        Raises:
            NoKernelError: there is no such kernel.
        """
        wanted = batch_invariance.is_wanted()
        return self.kernels.select(current_device(), _mode(kv_cache_dtype), wanted)

    def head_sizes(self, kv_cache_dtype: str) -> tuple[int, ...]:
        """Head sizes supported on this device with a cache dtype; empty if there is no kernel."""
        family = device_family(current_device())
        return self.head_dims.get((family, _mode(kv_cache_dtype)), ())

    def label(self, kv_cache_dtype: str) -> str:
        """Name for reports, e.g. ``nvfp4_paged_attention/reference (cpu)``."""
        prefill = f", prefill {self.prefill}" if self.prefill else ""
        return self.kernel(kv_cache_dtype).label + prefill


PAGED = Implementation(PagedAttentionImpl, PagedAttentionMetadataBuilder, PAGED_KERNELS, HEAD_DIMS)
DECODE = Implementation(
    HopperAttentionImpl,
    HopperMetadataBuilder,
    DECODE_KERNELS,
    DECODE_HEAD_DIMS,
    # What FlashAttention's prefill and our decode kernel have run with on a GPU.
    sinks=False,
    default_head_sizes=(64, 128, 256),
    fp8_by_default=False,
    max_group=MAX_GROUP,
    prefill=hopper.PREFILL,
    unsupported_reason=hopper.unsupported_reason,
)
IMPLEMENTATIONS = {"cpu": PAGED, "sm_90": DECODE, "sm_100": PAGED}


def implementation() -> Implementation:
    """Implementation for this process's device.

    An unlisted family gets ``PAGED``, whose method ``kernel`` raises an error that lists the
    existing kernels.
    """
    return IMPLEMENTATIONS.get(device_family(current_device()), PAGED)


def _mode(kv_cache_dtype: str) -> Mode:
    return "fp8_kv" if kv_cache_dtype in FP8_DTYPES else "float"
