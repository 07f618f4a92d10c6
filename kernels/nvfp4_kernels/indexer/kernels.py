"""Kernel tables of the indexer's ops, and limits on the ops' sizes."""

from nvfp4_kernels.dispatch import Entries, KernelTable, Mode

MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 32  # the largest block of a format
MAX_TOP_K = 4096
# Architecture families with instructions that convert to E2M1 (PTX ISA, cvt.e2m1x2).
E2M1_CONVERSION_FAMILIES = {"sm_100"}

_FORMATS: tuple[Mode, ...] = ("nvfp4", "mxfp4", "fp8", "bf16")


def _table(name: str, *modes: Mode, **gpus: tuple[str, str]) -> KernelTable:
    """Kernel table of an op for ``modes``: the reference on CPU, and a kernel per GPU family."""
    target = f"nvfp4_kernels.indexer.reference:{name}"
    kernels: Entries = {("cpu", *modes): ("reference", target)}
    kernels |= {(arch, *modes): gpu for arch, gpu in gpus.items()}
    return KernelTable(f"indexer_{name}", kernels)


def _cache_table(name: str, kernel: str) -> KernelTable:
    """Kernel table of an op on stored vectors, for which one kernel serves all GPU families."""
    found = kernel, f"nvfp4_kernels.indexer.vectors.launch:{name}"
    return _table(name, *_FORMATS, sm_90=found, sm_100=found)


_LOGITS = "IndexerLogitsSm100", "nvfp4_kernels.indexer.sm100.launch_logits:logits"
_SCORE_TOPK = "IndexerScoreTopkSm100", "nvfp4_kernels.indexer.sm100.best_keys.launch:score_topk"
_TOPK = "IndexerTopk", "nvfp4_kernels.indexer.topk.launch:topk"

QUANTIZE_Q_KERNELS = _cache_table("quantize_q", "StoreVectors")
STORE_K_KERNELS = _cache_table("store_k", "StoreVectors")
GATHER_K_KERNELS = _cache_table("gather_k", "GatherVectors")
LOGITS_KERNELS = _table("logits", *_FORMATS, sm_100=_LOGITS)
SCORE_TOPK_KERNELS = _table("score_topk", *_FORMATS, sm_100=_SCORE_TOPK)
TOPK_KERNELS = _table("topk", "float", sm_90=_TOPK, sm_100=_TOPK)
