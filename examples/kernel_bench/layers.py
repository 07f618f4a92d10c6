"""Linear layers of a model, to benchmark: sizes, bytes and FLOP."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from examples.llama_shapes import SHAPES, write_config
from nvfp4_kernels.precompile.model import Model
from nvfp4_kernels.tool.config_file import UnusableModel
from nvfp4_kernels.tool.model import read_model

BF16_BYTES = 2
NVFP4_BYTES = 0.5 + 1 / 16  # a code, and its share of a block scale


@dataclass(frozen=True)
class BenchLayer:
    """A linear layer, or a gate and up projection followed by SiLU-and-multiply.

    Attributes:
        name: name of the layer in a decoder layer, such as ``qkv_proj``.
        n: number of rows of the weight; for a gate and up projection, rows of each of the two.
        k: number of elements of a row.
        gate_up: whether the layer is the fused gate and up projection.
        shard_sizes: numbers of rows of q, k and v for ``qkv_proj``; else ``n`` alone.
    """

    name: str
    n: int
    k: int
    gate_up: bool
    shard_sizes: tuple[int, ...]

    @property
    def weights(self) -> int:
        """Number of weight matrices, of ``n`` rows each."""
        return 2 if self.gate_up else 1

    @property
    def elements(self) -> int:
        """Number of elements of all matrices of the layer."""
        return self.weights * self.n * self.k

    def flops(self, m: int) -> float:
        """Number of multiplications and additions for ``m`` tokens."""
        return 2.0 * m * self.elements

    def nbytes(self, m: int, weight_bytes: float) -> float:
        """Bytes that must move for ``m`` bfloat16 tokens, given the bytes per weight element."""
        return self.elements * weight_bytes + BF16_BYTES * m * (self.k + self.n)


def read_layers(model: str, names: Sequence[str] | None = None) -> list[BenchLayer]:
    """Layers of a built-in shape or of a ``config.json``.

    Args:
        model: a key of ``SHAPES``, or a path to the file or its folder.
        names: names of the selected layers; None for all.

    Raises:
        UnusableModel: no such model or layer; the message lists the known names.
    """
    found = [_bench_layer(read, layer.name) for read in [_read(model)] for layer in read.layers]
    there_is = [layer.name for layer in found]
    for name in names or ():
        if name not in there_is:
            raise UnusableModel(f"--layers: is {name!r}, must be among {', '.join(there_is)}")
    return [layer for layer in found if names is None or layer.name in names]


def _read(model: str) -> Model:
    if model in SHAPES:
        with TemporaryDirectory() as folder:
            return read_model(write_config(Path(folder), model))
    if not Path(model).exists():
        raise UnusableModel(
            f"--model: is {model!r}, must be one of {', '.join(SHAPES)} or the path of a "
            "config.json; download the model's first"
        )
    return read_model(Path(model))


def _bench_layer(model: Model, name: str) -> BenchLayer:
    [layer] = [layer for layer in model.layers if layer.name == name]
    sizes: tuple[int, ...] = (layer.n,)
    attention = model.attention
    if name == "qkv_proj" and attention is not None:
        q, kv = (h * attention.head_dim for h in (attention.query_heads, attention.kv_heads))
        sizes = (q, kv, kv)
    return BenchLayer(name, layer.n, layer.k, layer.gate_up, sizes)
