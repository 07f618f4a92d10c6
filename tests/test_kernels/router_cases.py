"""Routers of a mixture of experts, and logits that separate exact from approximate choices."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels.moe.router import Router


@dataclass(frozen=True)
class RouterCase:
    """A batch's logits and the rule that reads them.

    Attributes:
        tokens: number of tokens.
        experts: number of experts of all ranks.
        router: the rule.
        dtype: dtype of the logits.
        biased: whether there is a bias.
        padded: whether some rows are padding.
        ties: whether logits are a few whole numbers, so that many are equal.
    """

    tokens: int
    experts: int
    router: Router
    dtype: torch.dtype = torch.bfloat16
    biased: bool = False
    padded: bool = False
    ties: bool = False

    def given(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Logits, bias and padding, on the CPU.

        Scores are equal or differ by more than a kernel's approximations, except with a bias;
        sums of a bias and tied scores are exact.
        """
        shape = (self.tokens, self.experts)
        logits = torch.randint(-2, 3, shape).float() if self.ties else 2 * torch.randn(shape)
        bias = padding = None
        if self.biased:
            bias = torch.zeros(self.experts) if self.ties else torch.randn(self.experts)
        if self.padded:
            padding = torch.rand(self.tokens) < 0.4
        return logits.to(self.dtype), bias, padding


F32 = torch.float32
DEEPSEEK = Router(8, "sigmoid", groups=8, top_groups=4, scale=2.5)
CASES = {
    "Qwen3": RouterCase(13, 128, Router(8)),
    "Mixtral": RouterCase(9, 8, Router(2)),
    "DeepSeek V2": RouterCase(7, 160, Router(6, renormalize=False, groups=8, top_groups=3)),
    "DeepSeek V3": RouterCase(6, 256, DEEPSEEK, F32, biased=True),
    "GLM 4": RouterCase(6, 160, Router(8, "sigmoid", scale=1.5), F32, biased=True),
    "all weights": RouterCase(5, 40, Router(3, renormalize=False, scale=0.5), torch.float16),
    "softmax and bias": RouterCase(5, 72, Router(4), biased=True),
    "its weights as they are": RouterCase(5, 72, Router(4, renormalize=False), F32, biased=True),
    "sigmoids as they are": RouterCase(5, 33, Router(4, "sigmoid", renormalize=False)),
    "ties": RouterCase(21, 128, Router(8), ties=True),
    "ties of float32": RouterCase(21, 48, Router(5), F32, ties=True),
    "ties of groups": RouterCase(
        21, 64, Router(4, "sigmoid", groups=8, top_groups=2), biased=True, ties=True
    ),
    "ties of plain groups": RouterCase(21, 64, Router(4, groups=8, top_groups=2), ties=True),
    "padding": RouterCase(19, 16, Router(2, "sigmoid"), padded=True),
    "one expert": RouterCase(3, 1, Router(1)),
    "every expert": RouterCase(3, 32, Router(32), F32),
    "no token": RouterCase(0, 8, Router(2)),
    "many experts": RouterCase(2, 1024, Router(22, "sigmoid")),
}
