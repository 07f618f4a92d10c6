"""Kernels of the indexer's ops, and the sizes that the ops take."""

from nvfp4_kernels.dispatch import KernelTable, Mode

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 32  # the largest block of a format
MAX_TOP_K = 4096

_FORMATS: tuple[Mode, ...] = ("nvfp4", "mxfp4", "fp8", "bf16")


def _table(name: str, *modes: Mode, gpu: tuple[str, str] | None = None) -> KernelTable:
    target = f"nvfp4_kernels.indexer.reference:{name}"
    kernels = {("cpu", mode): ("reference", target) for mode in modes}
    if gpu is not None:
        kernels |= {(arch, mode): gpu for arch in ("sm_90", "sm_100") for mode in modes}
    return KernelTable(f"indexer_{name}", kernels)


def _cache_table(name: str, kernel: str) -> KernelTable:
    gpu = kernel, f"nvfp4_kernels.indexer.cache_kernel:{name}"
    return _table(name, *_FORMATS, gpu=gpu)


QUANTIZE_Q_KERNELS = _cache_table("quantize_q", "StoreVectors")
STORE_K_KERNELS = _cache_table("store_k", "StoreVectors")
GATHER_K_KERNELS = _cache_table("gather_k", "GatherVectors")
LOGITS_KERNELS = _table("logits", *_FORMATS)
LOGITS_PAGED_KERNELS = _table("logits_paged", *_FORMATS)
SCORE_TOPK_KERNELS = _table("score_topk", *_FORMATS)
SCORE_TOPK_PAGED_KERNELS = _table("score_topk_paged", *_FORMATS)
TOPK_KERNELS = _table("topk", "float", gpu=("TopK", "nvfp4_kernels.topk.kernel:topk"))
