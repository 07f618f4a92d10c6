"""Location of a linear's weight in a checkpoint: a tensor of its own, or part of a stack."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vllm_fp4_plugin.quantizer.source import Source

_EXPERT = re.compile(r"(.*\bexperts)\.\d+\.")


@dataclass(frozen=True)
class StoredWeight:
    """Location of a linear's weight, ``(N, K)``.

    Attributes:
        tensor: tensor that holds the weight.
        shape: N and K.
        expert: index of the expert in a stack, ``(experts, rows, K)``, whose rows may be those of
            gate and up; None: the tensor is the weight.
        first_row: first of the weight's N rows among the expert's rows.
        is_transposed: whether the stack is ``(experts, K, rows)``.
    """

    tensor: str
    shape: tuple[int, int]
    expert: int | None = None
    first_row: int = 0
    is_transposed: bool = False

    def load(self, source: Source) -> Tensor:
        """Map the weight from its file, or copy a weight that is stored transposed."""
        weight = source.load(self.tensor)
        if self.expert is None:
            return weight
        weight = weight[self.expert]
        if self.is_transposed:
            weight = weight.mT
        return weight[self.first_row : self.first_row + self.shape[0]].contiguous()


def ignoring(fused: Sequence[str]) -> str:
    """``--ignore`` options for all linears of a fused matrix, or for an expert's whole layer."""
    names = [found[1] if (found := _EXPERT.match(name)) else name for name in fused]
    return " ".join(f"--ignore {name}" for name in dict.fromkeys(names))
