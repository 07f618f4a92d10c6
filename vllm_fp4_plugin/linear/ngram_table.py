"""N-gram table of Qwen4Exp.

vLLM reads the table in the dtype that the model's config states or, without a dtype, according to
the quantization config's class. For an unknown class, such as ours, vLLM 0.33 assumes 16 bits, with
a warning; 0.32 fails while it builds the model.
"""

import re
from collections.abc import Mapping
from typing import Any

from vllm_fp4_plugin.checkpoint.files import TensorHeader
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.versions import vllm_release

_ARCHITECTURE = "Qwen4Exp"
_TABLE = re.compile(r"\.ngram_embedding(\.shard_\d+)?\.weight(_packed)?$")
_SIXTEEN_BITS = ("BF16", "F16")
_FIELD, _FP8 = "ple_embedding_dtype", "float8_e4m3fn"


def check(headers: Mapping[str, TensorHeader], hf_config: Any) -> None:
    """Raise unless the table is in 16 bits, or the model's config states the table's dtype.

    Raises:
        UnsupportedCheckpoint: vLLM would read quantised codes as 16-bit values, or this release of
            vLLM has no 16-bit table for our quantization config.
    """
    configs = (hf_config, getattr(hf_config, "text_config", None))
    names = [name for each in configs for name in getattr(each, "architectures", None) or ()]
    told = {value for each in configs if (value := getattr(each, _FIELD, None)) is not None}
    if not any(name.startswith(_ARCHITECTURE) for name in names):
        return
    tables = {name: header for name, header in headers.items() if _TABLE.search(name)}
    for name, header in tables.items():
        if not told and header.dtype not in _SIXTEEN_BITS:
            raise UnsupportedCheckpoint(
                f"{header.file}: {name} is {header.dtype}, must be BF16 or F16: {names[0]}'s table "
                f"of n-grams is read in 16 bits by vLLM beside nvfp4-tc where config.json has no "
                f"{_FIELD}; serve the model with --quantization modelopt_mixed or modelopt"
            )
    if vllm_release() == "0.32" and tables and told != {_FP8}:
        raise UnsupportedCheckpoint(
            f"{next(iter(tables))}: with vLLM 0.32, {names[0]}'s table of n-grams must be in "
            f"{_FP8}, and config.json must say so in {_FIELD}, beside nvfp4-tc; install vLLM 0.33"
        )
