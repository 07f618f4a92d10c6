"""Element types by name, as kernels' configurations spell them."""

from typing import Any

from cutlass import BFloat16, Float16, Float32, Uint8

# E4M3 is moved as bytes: kernels convert float32 to E4M3 four elements at a time.
TYPES: dict[str, Any] = {
    "bfloat16": BFloat16,
    "float16": Float16,
    "float32": Float32,
    "float8_e4m3fn": Uint8,
}
