"""Element types by name, as kernels' configurations spell them."""

from typing import Any

from cutlass import BFloat16, Float16, Float32

TYPES: dict[str, Any] = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}
