"""Variants to compare: ways to make a model's files and to serve them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from examples.methods import METHODS
from nvfp4_kernels.settings import MAX_TERMS

REFERENCE = "bf16"
ROUNDED_WEIGHTS, ROUNDED_BOTH = YARDSTICKS = ("rounded-weights", "rounded-both")

# Tensors that a variant keeps in NVFP4, or in another format of less than 16 bits.
Rounds = Literal["nothing", "weights", "weights and activations", "weights, activations to FP8"]
# Format that inputs of linears are rounded to: a number of NVFP4 terms, or E4M3 ("fp8").
InputFormat = int | Literal["fp8"]


class BadVariant(ValueError):
    """Error for an unknown or unusable variant; the message gives the accepted values."""


@dataclass(frozen=True)
class Variant:
    """One way to serve the model.

    Attributes:
        name: name, safe in file names.
        title: description to display.
        rounds: tensors that have fewer than 16 bits; the KV cache does not count.
        method: ``--quantization`` of ``vllm serve``; None: no such option.
        tool: options of the quantising tool for the variant's files; None: no files are made.
        calibrated: whether the tool gets the calibration text.
        checkpoint: folder of the files, if supplied by the user.
        options: further options of ``vllm serve``.
        needs_gpu: whether vLLM supports the variant only on GPUs.
        input_format: format that a yardstick's activations are rounded to; 0: no rounding; None:
            the variant is not a yardstick.
    """

    name: str
    title: str
    rounds: Rounds
    method: str | None = "nvfp4-tc"
    tool: tuple[str, ...] | None = None
    calibrated: bool = True
    checkpoint: Path | None = None
    options: tuple[str, ...] = ()
    needs_gpu: bool = False
    input_format: InputFormat | None = None


_BOTH: Rounds = "weights and activations"
_TO_FP8: Rounds = "weights, activations to FP8"
_MODELOPT = ("--format", "modelopt")
_FP8_KV = ("--kv-cache-dtype", "fp8")
_UNFUSED = (
    "--additional-config",
    '{"nvfp4_tc": {"fuse_mlp": false, "fuse_norm": false, "fuse_attention": false}}',
)


def _online(name: str, scales: str) -> Variant:
    option = f'{{"nvfp4_tc": {{"scales": "{scales}"}}}}'
    return Variant(
        name, f"quantised at load, {scales}", _BOTH, options=("--additional-config", option)
    )


def _terms(terms: int) -> Variant:
    option = f'{{"nvfp4_tc": {{"activation_terms": {terms}}}}}'
    return Variant(
        f"nvfp4-tc-terms-{terms}", f"ModelOpt files, activations of {terms} terms", _BOTH,
        tool=_MODELOPT, options=("--additional-config", option),
    )  # fmt: skip


def _fp8(name: str, title: str, calibrated: bool) -> Variant:
    option = '{"nvfp4_tc": {"activation": "fp8"}}'
    return Variant(
        name, f"ModelOpt files, {title}", _TO_FP8, tool=_MODELOPT, calibrated=calibrated,
        options=("--additional-config", option),
    )  # fmt: skip


def _yardstick(name: str, title: str, rounds: Rounds, input_format: InputFormat) -> Variant:
    eager = ("--enforce-eager",)  # otherwise the hooks on its layers would not run
    return Variant(name, title, rounds, method=None, options=eager, input_format=input_format)


def _rounded_terms(terms: int) -> Variant:
    title = f"weights rounded, activations to {terms} terms"
    return _yardstick(f"rounded-terms-{terms}", title, _BOTH, terms)


def known_variants(vllm_attention: str) -> dict[str, Variant]:
    """Variants that can be requested by name; ``vllm_attention`` is vLLM's attention backend."""
    variants = (
        Variant(REFERENCE, "as it is", "nothing", method=None),
        Variant("bf16-our-attention", "as it is, our attention", "nothing", method=None,
                options=("--attention-backend", "CUSTOM")),
        Variant("bf16-fp8-kv", "as it is, FP8 KV cache", "nothing", method=None, options=_FP8_KV),
        Variant("nvfp4-tc", "ModelOpt files, absmax", _BOTH, tool=_MODELOPT),
        Variant("nvfp4-tc-sweep", "ModelOpt files, sweep", _BOTH,
                tool=(*_MODELOPT, "--scales", "sweep")),
        Variant("nvfp4-tc-four-over-six", "ModelOpt files, four-over-six", _BOTH,
                tool=(*_MODELOPT, "--scales", "four-over-six")),
        Variant("nvfp4-tc-compressed-tensors", "compressed-tensors files, absmax", _BOTH,
                tool=("--format", "compressed-tensors")),
        Variant("nvfp4-tc-w4a16", "ModelOpt files, weights only", "weights", tool=_MODELOPT,
                calibrated=False),
        _fp8("nvfp4-tc-fp8", "FP8 activations, calibrated", calibrated=True),
        _fp8("nvfp4-tc-fp8-per-token", "FP8 activations, a scale per token", calibrated=False),
        Variant("nvfp4-tc-fp8-kv", "ModelOpt files, FP8 KV cache", _BOTH,
                tool=(*_MODELOPT, "--kv-cache-scheme", "fp8"), options=_FP8_KV),
        Variant("nvfp4-tc-vllm-attention", f"ModelOpt files, {vllm_attention}", _BOTH,
                tool=_MODELOPT, options=("--attention-backend", vllm_attention)),
        Variant("nvfp4-tc-unfused", "ModelOpt files, each op alone", _BOTH, tool=_MODELOPT,
                options=_UNFUSED),
        _online("nvfp4-tc-online", "absmax"),
        _online("nvfp4-tc-online-sweep", "sweep"),
        _online("nvfp4-tc-online-four-over-six", "four-over-six"),
        *(_terms(terms) for terms in (2, 3)),
        _yardstick("rounded-fp8", "weights rounded, activations to FP8", _TO_FP8, "fp8"),
        *(_rounded_terms(terms) for terms in range(2, MAX_TERMS + 1)),
        # vLLM's loader applies one of the scales of q/k/v, and of gate/up, to all.
        Variant("modelopt", "ModelOpt files, vLLM's own kernels", _BOTH, needs_gpu=True,
                method=METHODS["modelopt"], tool=(*_MODELOPT, "--shared-fused-scale")),
    )  # fmt: skip
    return {variant.name: variant for variant in variants}


# Measured by default.
DEFAULT_CPU = ("nvfp4-tc", "nvfp4-tc-online-four-over-six", "nvfp4-tc-w4a16")
DEFAULT_GPU = (
    "nvfp4-tc", "nvfp4-tc-sweep", "nvfp4-tc-four-over-six", "nvfp4-tc-w4a16", "nvfp4-tc-fp8-kv",
    "modelopt",
)  # fmt: skip


def yardsticks() -> tuple[Variant, Variant]:
    """16-bit models with weights, or weights and activations, rounded to NVFP4 and back.

    All yardsticks are served from the same files, one after the other.
    """
    return (
        _yardstick(ROUNDED_WEIGHTS, "weights rounded", "weights", 0),
        _yardstick(ROUNDED_BOTH, "weights and activations rounded", _BOTH, 1),
    )


def parse_variants(written: Sequence[str], vllm_attention: str) -> tuple[Variant, ...]:
    """Variants that ``written`` names, without the reference.

    Args:
        written: known names, or ``LABEL[:METHOD]=CHECKPOINT``.
        vllm_attention: vLLM's attention backend on this device.

    Raises:
        BadVariant: an unknown or repeated name, a label unsafe in file names, an unknown method, a
            missing checkpoint.
    """
    known = known_variants(vllm_attention)
    variants: list[Variant] = []
    for text in written:
        variant = _own(text, known) if "=" in text else known.get(text)
        if variant is None:
            raise BadVariant(
                f"--variants: is {text!r}, must be among {', '.join(known)}, or "
                "LABEL[:METHOD]=CHECKPOINT for files of your own"
            )
        if any(variant.name == other.name for other in variants):
            raise BadVariant(f"--variants: {variant.name} is there twice; name each variant once")
        variants.append(variant)
    return tuple(variant for variant in variants if variant.name != REFERENCE)


def _own(text: str, known: dict[str, Variant]) -> Variant:
    named, _, checkpoint = text.partition("=")
    label, _, method = named.partition(":")
    method = method or "nvfp4-tc"
    if not label.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise BadVariant(
            f"--variants: label is {label!r}, must be letters, digits, dots, dashes and "
            "underscores; it names files"
        )
    if label in known or label in YARDSTICKS:
        raise BadVariant(f"--variants: label {label!r} is taken by a known variant; choose another")
    if method not in METHODS:
        raise BadVariant(
            f"--variants: method of {label} is {method!r}, must be among {', '.join(METHODS)}"
        )
    folder = Path(checkpoint).resolve()
    if not (folder / "config.json").is_file():
        raise BadVariant(f"--variants: {label}: {folder} holds no config.json; give a checkpoint")
    return Variant(
        label, f"{folder.name}, by {method}", _BOTH, method=METHODS[method], checkpoint=folder
    )
