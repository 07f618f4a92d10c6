"""Layers of a model as servers run them: linears fused into one matrix form one layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from vllm_fp4_plugin.formats import FORMATS
from vllm_fp4_plugin.quantizer.linears import Selection
from vllm_fp4_plugin.quantizer.source import Source
from vllm_fp4_plugin.quantizer.tensors import linear_specs

# vLLM's names of the fused matrices.
FUSED = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}
BYTES_IN_16_BITS = 2


@dataclass(frozen=True)
class Group:
    """Linears that are quantised together or not at all.

    Attributes:
        name: name of the fused layer.
        linears: names of the linears in the checkpoint.
        weights: number of weights.
        quantised_bytes: bytes of all tensors of the linears in NVFP4, in ModelOpt's format.
    """

    name: str
    linears: tuple[str, ...]
    weights: int
    quantised_bytes: int

    @property
    def extra_bytes(self) -> int:
        """Bytes added by leaving the group in 16 bits."""
        return BYTES_IN_16_BITS * self.weights - self.quantised_bytes

    @property
    def kind(self) -> str:
        """The last part of the group's name, the same in every decoder layer."""
        return self.name.rpartition(".")[2]


def find_groups(source: Source, selection: Selection, weight_only: bool) -> list[Group]:
    """Groups of the linears to quantise, in the model's order.

    Args:
        source: the 16-bit checkpoint.
        selection: selected linears of the checkpoint.
        weight_only: whether no input scales are stored.
    """
    members = dict.fromkeys(tuple(selection.fused[name]) for name in selection.quantized)
    return [_group(source, linears, weight_only) for linears in members]


def bits_per_weight(groups: Sequence[Group], ignored: Sequence[Group]) -> float:
    """Mean bits per weight of ``groups``, scales included, if ``ignored`` stay in 16 bits."""
    nbytes = sum(g.quantised_bytes for g in groups) + sum(g.extra_bytes for g in ignored)
    return 8 * nbytes / sum(group.weights for group in groups)


def linears_of(groups: Sequence[Group]) -> list[str]:
    """Names of all linears of ``groups``."""
    return [name for group in groups for name in group.linears]


def _group(source: Source, linears: tuple[str, ...], weight_only: bool) -> Group:
    parent, _, _ = linears[0].rpartition(".")
    leaves = tuple(name.rpartition(".")[2] for name in linears)
    shapes = {name: source.specs[f"{name}.weight"].shape for name in linears}
    specs = [
        spec
        for name, shape in shapes.items()
        for spec in linear_specs(FORMATS["modelopt"], name, shape, not weight_only).values()
    ]
    return Group(
        name=f"{parent}.{FUSED.get(leaves, '+'.join(leaves))}",
        linears=linears,
        weights=sum(map(prod, shapes.values())),
        quantised_bytes=sum(spec.nbytes for spec in specs),
    )
