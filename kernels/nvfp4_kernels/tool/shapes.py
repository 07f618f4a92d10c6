"""GEMM shapes for reports and timings: of a public contest, and of a model's layers."""

from collections.abc import Iterable
from dataclasses import dataclass

from nvfp4_kernels.gemm.sm100.choose import Problem
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig
from nvfp4_kernels.precompile.linear_sm100 import layer_epilogue
from nvfp4_kernels.precompile.model import Dtype, Layer, Model
from nvfp4_kernels.tool.model import check_sizes, numbers

TOKENS = (1, 8, 32, 64, 128, 256, 1024, 8192)


@dataclass(frozen=True)
class Shape:
    """Shape of a GEMM.

    Attributes:
        name: name for tables.
        layer: N, K and kind of the layer.
        m: number of tokens.
        batch: number of matrices; above 1, each has its own weight.
        dtype: dtype of the result.
        published: speed of light in µs, as published by the GPU MODE contest; 0: none.
        per_token: whether each token has its own global scale.
    """

    name: str
    layer: Layer
    m: int
    batch: int = 1
    dtype: Dtype = "bfloat16"
    published: float = 0.0
    per_token: bool = False

    @property
    def problem(self) -> Problem:
        return Problem(self.m, self.layer.n, self.layer.k, self.batch, self.layer.weights)

    @property
    def sizes(self) -> str:
        """Sizes as ``M×N×K`` or ``M×N×K×L``."""
        sizes = [self.m, self.layer.n, self.layer.k, *([self.batch] if self.batch > 1 else [])]
        return "×".join(map(str, sizes))

    @property
    def output(self) -> EpilogueConfig:
        return layer_epilogue(self.layer, self.dtype, self.per_token, self.m)


def _contest(
    name: str, m: int, n: int, k: int, published: float, batch: int = 1, gate_up: bool = False
) -> Shape:
    return Shape(name, Layer(name, n, k, gate_up), m, batch, "float16", published)


# NVFP4 kernel contest on B200 (GPU MODE and NVIDIA, 2025), with its speed of light at 1.5 GHz.
CONTEST = (
    _contest("GEMV", 1, 7168, 16384, 8.622),
    _contest("GEMV", 1, 4096, 7168, 17.275, batch=8),
    _contest("GEMV", 1, 7168, 2048, 4.317, batch=4),
    _contest("GEMM", 128, 7168, 16384, 8.994),
    _contest("GEMM", 128, 4096, 7168, 2.354),
    _contest("GEMM", 128, 7168, 2048, 1.333),
    _contest("dual GEMM", 256, 4096, 7168, 4.708, gate_up=True),
    _contest("dual GEMM", 512, 4096, 7168, 8.714, gate_up=True),
    _contest("dual GEMM", 256, 3072, 4096, 2.125, gate_up=True),
    _contest("dual GEMM", 512, 3072, 7168, 6.535, gate_up=True),
)

LLAMA_8B = Model(
    "Llama 3 8B",
    "bfloat16",
    (
        Layer("qkv_proj", 6144, 4096, shards=3),
        Layer("o_proj", 4096, 4096),
        Layer("gate_up_proj", 14336, 4096, gate_up=True),
        Layer("down_proj", 4096, 14336),
    ),
)


def model_shapes(model: Model, tokens: Iterable[int] = TOKENS) -> list[Shape]:
    """Shapes of every layer of ``model`` at every number of tokens."""
    return [
        Shape(layer.name, layer, m, dtype=model.dtype) for layer in model.layers for m in tokens
    ]


def given_shape(text: str, gate_up: bool, dtype: Dtype | None = None) -> Shape:
    """Shape from ``"M,N,K"`` or ``"M,N,K,L"``; bfloat16, unless ``dtype`` is given.

    Raises:
        UnusableModel: ``text`` is not of this form, or N or K is unsupported.
    """
    m, n, k, *rest = numbers(text, "--shape", "M,N,K[,L]")
    name = "gate_up" if gate_up else "linear"
    layer = Layer(f"{name} {n},{k}", n, k, gate_up)
    check_sizes(layer)
    return Shape(name, layer, m, batch=rest[0] if rest else 1, dtype=dtype or "bfloat16")
