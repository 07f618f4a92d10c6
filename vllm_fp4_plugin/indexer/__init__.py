"""Indexer of sparse attention (DeepSeek V3.2, V4) on ``nvfp4_kernels``'s ops.

This package replaces vLLM's ``SparseAttnIndexer``: our kernels store keys and compute top-k indices
without materialising the scores. The key format is set by ``--additional-config '{"nvfp4_tc":
{"indexer_format": "nvfp4"}}'``, under any quantization method. Without this option our kernels
serve only models with quantization method ``nvfp4-tc``, in vLLM's key format: FP8, or MXFP4 if
DeepSeek V4 is served with ``--attention-config '{"indexer_kv_dtype": "mxfp4"}'``.

=======================================  ======  ======  ======  ======
layer                                    nvfp4   mxfp4   fp8     bf16
=======================================  ======  ======  ======  ======
bytes per key of 128 elements            72      68      132     256
``deepseek_v2.Indexer`` (V3.2 non-CUDA)  yes     yes     yes     yes
``DeepseekV32Attention`` (V3.2 on CUDA)  yes     yes     yes     yes
``DeepseekV4Indexer``                    no      native  native  no
other callers, FP8 queries               no      no      yes     no
=======================================  ======  ======  ======  ======

"native": only if vLLM's option ``indexer_kv_dtype`` selects this format, as vLLM's compressor has
stored the keys already. Unsupported are context parallelism, the two-level top-k of DeepSeek V4.1,
a dtype other than bfloat16, a device without kernels, and FP8 keys whose scales DeepSeek V4 stores
as exponents (vLLM 0.33 on sm_100). If ``indexer_format`` is set, an error names the unsupported
feature; otherwise vLLM's kernels serve, and the log gives the reason.

NVFP4's global scale is 1 for queries and keys: an E4M3 scale per block of 16 is exact enough for
blocks whose largest magnitude is from 0.1 to 2688, and no calibration is needed.
"""
