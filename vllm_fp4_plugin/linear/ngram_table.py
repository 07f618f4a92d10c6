"""N-gram table of Qwen4Exp, which vLLM reads according to the quantization config's class.

For an unknown class, such as ours, vLLM assumes a 16-bit table, unless the model's config states a
dtype: vLLM 0.33 with a warning, 0.32 silently.
"""

import re
from collections.abc import Mapping
from typing import Any

from vllm_fp4_plugin.checkpoint.files import TensorHeader
from vllm_fp4_plugin.formats import UnsupportedCheckpoint

_ARCHITECTURE = "Qwen4Exp"
_TABLE = re.compile(r"\.ngram_embedding(\.shard_\d+)?\.weight(_packed)?$")
_SIXTEEN_BITS = ("BF16", "F16")
_FIELD = "ple_embedding_dtype"


def check(headers: Mapping[str, TensorHeader], hf_config: Any) -> None:
    """Raise unless the table is in 16 bits, or the model's config states its dtype.

    Raises:
        UnsupportedCheckpoint: vLLM would read quantised codes as 16-bit values.
    """
    configs = (hf_config, getattr(hf_config, "text_config", None))
    names = [name for each in configs for name in getattr(each, "architectures", None) or ()]
    told = any(getattr(each, _FIELD, None) is not None for each in configs)
    if told or not any(name.startswith(_ARCHITECTURE) for name in names):
        return
    for name, header in headers.items():
        if _TABLE.search(name) and header.dtype not in _SIXTEEN_BITS:
            raise UnsupportedCheckpoint(
                f"{header.file}: {name} is {header.dtype}, must be BF16 or F16: {names[0]}'s table "
                f"of n-grams is read in 16 bits by vLLM beside nvfp4-tc where config.json has no "
                f"{_FIELD}; serve the model with --quantization modelopt_mixed or modelopt"
            )
