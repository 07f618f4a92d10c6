"""Variants to compare: a model in 16 bits, or in NVFP4 as served by different methods."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.llama_shapes import SHAPES, write_config
from examples.methods import METHODS
from examples.moe_shapes import MOE_SHAPES
from examples.random_checkpoint import write_checkpoint
from examples.throughput.cases import BadOption
from vllm_fp4_plugin.formats import FORMATS

_OF_EXPERTS = ("nvfp4-tc", "modelopt")  # variants that serve ModelOpt's files


@dataclass(frozen=True)
class Variant:
    """One way to serve the model.

    Attributes:
        name: a key of ``METHODS``, written before any ``=MODEL`` on the command line.
        model: path, name at the hub, or a key of ``SHAPES`` or ``MOE_SHAPES``.
    """

    name: str
    model: str

    @property
    def method(self) -> str | None:
        """Value for vLLM's ``quantization``."""
        return METHODS[self.name]

    @property
    def shape(self) -> bool:
        """Whether the model is a built-in shape, without a checkpoint."""
        return self.model in SHAPES or self.model in MOE_SHAPES

    @property
    def dummy(self) -> bool:
        """Whether vLLM generates dummy weights, as it does for a shape in 16 bits."""
        return self.shape and self.name == "bf16"

    def written(self, folder: Path) -> str:
        """Model to pass to vLLM; a shape is first written as a config or checkpoint to ``folder``.

        For bf16, the shape's config alone is written; else a checkpoint of random NVFP4 weights,
        shared by all variants that read the checkpoint's format.
        """
        if not self.shape:
            return self.model
        if self.dummy:
            made = folder / f"{self.model}-{self.name}"
            made.mkdir()
            return str(write_config(made, self.model))
        format = FORMATS["compressed-tensors" if self.name == "compressed-tensors" else "modelopt"]
        config = (SHAPES | MOE_SHAPES)[self.model]
        return str(write_checkpoint(folder / f"{self.model}-{format.name}", config, format))

    def engine_args(self) -> dict[str, Any]:
        """Arguments of the engine for this variant, except the model."""
        args: dict[str, Any] = {"quantization": self.method}
        return args | ({"load_format": "dummy"} if self.dummy else {})


def parse_variants(model: str, written: Sequence[str]) -> tuple[Variant, ...]:
    """Variants of ``model``, each written ``NAME`` or ``NAME=MODEL``.

    Raises:
        BadOption: an unknown or repeated name, a model that does not exist, or a shape or local
            checkpoint that the method cannot serve.
    """
    variants: list[Variant] = []
    for text in written:
        name, _, own = text.partition("=")
        if name not in METHODS:
            raise BadOption(
                f"--quantization: is {name!r}, must be among {', '.join(METHODS)}, or one of them "
                "and =MODEL"
            )
        if any(name == other.name for other in variants):
            raise BadOption(f"--quantization: {name} is there twice; name each variant once")
        variant = Variant(name, _resolved(own or model))
        if variant.model in MOE_SHAPES and name not in _OF_EXPERTS:
            raise BadOption(
                f"--quantization: is {name!r}, must be among {', '.join(_OF_EXPERTS)} for "
                f"{variant.model}, whose random weights are NVFP4 in ModelOpt's format"
            )
        _check_checkpoint(variant)
        variants.append(variant)
    return tuple(variants)


def _resolved(model: str) -> str:
    if model in SHAPES or model in MOE_SHAPES:
        return model
    path = Path(model)
    if path.exists():
        return str(path.resolve())
    looks_like_a_path = model.startswith((".", "/", "~")) or model.count("/") != 1
    if looks_like_a_path:
        raise BadOption(
            f"model: is {model!r}, which is no such directory, no name at the hub such as "
            f"org/model, and none of {', '.join(SHAPES | MOE_SHAPES)}"
        )
    return model


def _check_checkpoint(variant: Variant) -> None:
    """Check that a local checkpoint has the variant's quantisation."""
    folder = Path(variant.model)
    if variant.shape or not folder.is_dir():
        return
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise BadOption(
            f"{folder}: its config.json cannot be read ({error}); give a model's directory"
        ) from error
    quantised = "quantization_config" in config or (folder / "hf_quant_config.json").exists()
    if variant.name == "bf16" and quantised:
        raise BadOption(
            f"bf16: {folder} is quantised already; give the 16-bit checkpoint with bf16=MODEL, or "
            "leave the variant out"
        )
    if variant.name in ("modelopt", "compressed-tensors") and not quantised:
        raise BadOption(
            f"{variant.name}: {folder} is not quantised; make an NVFP4 checkpoint with "
            f"`python -m vllm_fp4_plugin quantize` and give it with {variant.name}=MODEL"
        )
