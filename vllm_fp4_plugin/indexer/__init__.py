"""The indexer of sparse attention (DeepSeek V3.2, V4) on ``nvfp4_kernels``'s ops.

This module replaces vLLM's ``SparseAttnIndexer``: it stores keys and computes top-k indices without
materialising the scores. The key format is set by ``--additional-config '{"nvfp4_tc":
{"indexer_format": "nvfp4"}}'``, under any quantization method. Without this option the indexer
serves models of ``nvfp4-tc`` alone, with vLLM's key format: FP8, or MXFP4 where DeepSeek V4 has
``--attention-config '{"indexer_kv_dtype": "mxfp4"}'``.

=======================================  ======  ======  ======  ======
layer                                    nvfp4   mxfp4   fp8     bf16
=======================================  ======  ======  ======  ======
bytes of a key of 128                    72      68      132     256
``deepseek_v2.Indexer`` (V3.2 but CUDA)  yes     yes     yes     yes
``DeepseekV32Attention`` (V3.2 on CUDA)  yes     yes     yes     yes
``DeepseekV4Indexer``                    no      native  native  no
other callers, FP8 queries               no      no      yes     no
=======================================  ======  ======  ======  ======

"native": the format of vLLM's own option, as vLLM's compressor has stored the keys already. An
unsupported configuration is refused by name if the option is set; otherwise vLLM's kernels serve
it, and the log gives the reason: context parallelism, the two-level top-k of DeepSeek V4.1, a dtype
other than bfloat16, a device without kernels, FP8 keys whose scales DeepSeek V4 stores as exponents
(vLLM 0.33 on sm_100).

NVFP4's global scale is 1 for queries and keys: an E4M3 scale per block of 16 is exact enough for
blocks whose largest value is from 0.1 to 2688, and no calibration is needed.
"""
