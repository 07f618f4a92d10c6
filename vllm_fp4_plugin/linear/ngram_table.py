"""N-gram table of Qwen4Exp.

vLLM chooses the table's format by ``ple_embedding_dtype`` of the model's config or, without this
field, by the class of the quantization config. For a class that vLLM does not know, such as ours,
0.33 logs a warning and assumes 16 bits; 0.32 raises ``NotImplementedError``.
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
    """Raise unless the table is in 16 bits, or the model's config states the table's dtype.

    Raises:
        UnsupportedCheckpoint: vLLM 0.33 would read the table's quantised codes as 16-bit values.
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
