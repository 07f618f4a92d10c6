"""Options shared by several commands."""

import os
from enum import StrEnum
from typing import Annotated

import typer

from nvfp4_kernels.precompile.model import DTYPES, Dtype

CPUS = os.cpu_count() or 1


class DtypeName(StrEnum):
    """Dtype of activations and results."""

    bfloat16 = "bfloat16"
    float16 = "float16"


class CacheName(StrEnum):
    """Data type of the KV cache."""

    auto = "auto"
    fp8 = "fp8"
    both = "both"


class ActivationName(StrEnum):
    """Format of activations: on sm_100 the scaling of NVFP4, on sm_90 the server's option."""

    static = "static"
    per_token = "per-token"
    both = "both"
    fp8 = "fp8"
    unquantized = "16-bit"

    @property
    def is_option(self) -> bool:
        """Whether the name is a value of the server's option ``activation``, for sm_90."""
        return self in (ActivationName.fp8, ActivationName.unquantized)


def dtype_of(name: DtypeName | None) -> Dtype | None:
    """Dtype of the option, as ``Model`` spells it; None if the option is not given."""
    return next((dtype for dtype in DTYPES if dtype == name), None)


TensorParallelOption = Annotated[int, typer.Option(help="GPUs that share each layer.")]
DtypeOption = Annotated[
    DtypeName | None, typer.Option(help="Instead of the model's own, or of bfloat16.")
]
JobsOption = Annotated[int, typer.Option(min=1, help="Processes that compile.")]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON document and nothing else; its fields are named above."
    ),
]
