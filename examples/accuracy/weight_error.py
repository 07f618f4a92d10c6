"""Error of a checkpoint's NVFP4 weights against the original 16-bit weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor
from vllm_fp4_plugin.checkpoint.files import read_headers
from vllm_fp4_plugin.formats import FORMATS
from vllm_fp4_plugin.quantizer.source import Source, open_source


@dataclass(frozen=True)
class WeightError:
    """Error of one linear's weight.

    Attributes:
        layer: name of the layer.
        relative: norm of the weight's error over the norm of the 16-bit weight.
        gain: factor that brings the 16-bit weight closest to the NVFP4 weight.
    """

    layer: str
    relative: float
    gain: float


def weight_errors(checkpoint: Path, model: Path) -> list[WeightError]:
    """Errors of all NVFP4 linears of a checkpoint; empty without such linears.

    Raises:
        ValueError: a linear is missing, or of another shape, in the 16-bit ``model``.
    """
    source = open_source(model)
    errors = []
    for layer, weight in _nvfp4_weights(checkpoint):
        name = f"{layer}.weight"
        spec = source.specs.get(name)
        if spec is None or spec.shape != weight.shape:
            found = "is missing" if spec is None else f"has shape {spec.shape}"
            raise ValueError(
                f"{name}: {found} in {model}, must be {weight.shape}; compare with the 16-bit "
                "checkpoint that this one was made of"
            )
        errors.append(_error(layer, weight.dequantize(), _load(source, name)))
    return errors


def _error(layer: str, rounded: Tensor, exact: Tensor) -> WeightError:
    power = exact.square().sum()
    if not power:
        return WeightError(layer, float(rounded.norm() > 0), 1.0)
    relative = ((rounded - exact).square().sum() / power).sqrt()
    return WeightError(layer, float(relative), float((rounded * exact).sum() / power))


def _load(source: Source, name: str) -> Tensor:
    return source.load(name).float()


def _nvfp4_weights(checkpoint: Path) -> Iterator[tuple[str, Nvfp4Tensor]]:
    headers = read_headers(checkpoint)

    def load(name: str) -> Tensor:
        with safe_open(headers[name].file, framework="pt") as file:
            return file.get_tensor(name)

    for format in FORMATS.values():
        names = format.names
        suffix = f".{names.weight_global}"
        for layer in (name.removesuffix(suffix) for name in headers if name.endswith(suffix)):
            scale = load(f"{layer}{suffix}").reshape(())
            factor = scale.reciprocal() if format.reciprocal else scale
            data, scales = (load(f"{layer}.{n}") for n in (names.weight, names.block_scale))
            yield layer, Nvfp4Tensor(data, scales, factor)
