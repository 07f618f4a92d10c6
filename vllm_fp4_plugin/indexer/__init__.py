"""The indexer of sparse attention (DeepSeek V3.2, V4) on ``nvfp4_kernels``'s ops.

It replaces vLLM's ``SparseAttnIndexer``: it stores keys, scores them and chooses the best without
ever holding the scores. How keys are stored is
``--additional-config '{"nvfp4_tc": {"indexer_format": "nvfp4"}}'``, whatever the quantization
method. Without that option it serves models of ``nvfp4-tc`` alone, with keys as vLLM would have
them: FP8, or MXFP4 where DeepSeek V4 has ``--attention-config '{"indexer_kv_dtype": "mxfp4"}'``.

=======================================  ======  ======  ======  ======
layer                                    nvfp4   mxfp4   fp8     bf16
=======================================  ======  ======  ======  ======
bytes of a key of 128                    72      68      132     256
``deepseek_v2.Indexer`` (V3.2 but CUDA)  yes     yes     yes     yes
``DeepseekV32Attention`` (V3.2 on CUDA)  yes     yes     yes     yes
``DeepseekV4Indexer``                    no      native  native  no
other callers, FP8 queries               no      no      yes     no
=======================================  ======  ======  ======  ======

"native": the one that vLLM's own option chose, as its compressor has stored the keys already.
What cannot be served is refused by name when the option asks for it; without the option it is left
to vLLM's kernels, and the log says why: context parallelism, the two-level choice of DeepSeek V4.1,
a dtype other than bfloat16, a device without kernels, FP8 keys whose scales DeepSeek V4 stores as
exponents (vLLM 0.33 on sm_100).

NVFP4's global scale is 1 for queries and keys: an E4M3 scale per block of 16 is exact enough for
blocks whose largest value is from 0.1 to 2688, and nothing has to be calibrated.
"""
