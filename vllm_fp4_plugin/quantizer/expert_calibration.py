"""Calibration of experts: every token goes to every expert, with one expert in memory at a time.

Every expert is thus calibrated on all tokens, even if the router selects it for only a few. The
layer still returns the sum over the experts that its router selects.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from vllm_fp4_plugin.quantizer.experts import ExpertsLayer, activate
from vllm_fp4_plugin.quantizer.maxima import Maxima, raise_maximum
from vllm_fp4_plugin.quantizer.source import Source

# Tokens per call of an expert: the activations stay small beside the weights.
_PIECE_TOKENS = 2048


class StreamedExperts:
    """Forward pass of a layer of experts that loads, runs and measures one expert at a time.

    Args:
        layer: the layer.
        source: checkpoint with the layer's weights.
        device: device of the forward pass.
        found: dict to which max|input| of every linear is added; None: the experts stay
            unquantised and are not measured.
        on_linear: called once per measured linear and forward pass.
    """

    def __init__(
        self,
        layer: ExpertsLayer,
        source: Source,
        device: torch.device,
        found: Maxima | None,
        on_linear: Callable[[], None],
    ):
        self._layer = layer
        self._source = source
        self._device = device
        self._found = found
        self._on_linear = on_linear

    def replace_forward_in(self, model: Any) -> None:
        """Replace the forward pass of the experts in ``model``; for Llama 4, of the MoE block."""
        self._module = model.get_submodule(self._layer.module)
        if self._layer.weighs_input:
            block = model.get_submodule(self._layer.module.rpartition(".")[0])
            block.forward = lambda hidden_states: self._run_block(block, hidden_states)
        else:
            self._module.forward = self._run

    def _run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs, of the shape of ``hidden_states``.

        Replaces the module's forward pass; ``top_k_index`` and ``top_k_weights`` are
        ``(tokens, slots)``.
        """
        x = hidden_states.flatten(0, -2)
        total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, top_k_weights.dtype))
        for number, first, last in self._mapped():
            for rows in _pieces(len(x)):
                tokens, slots = torch.where(top_k_index[rows] == number)
                hidden = self._hidden(number, x[rows], first, tokens)
                weights = top_k_weights[rows][tokens, slots, None]
                total[rows].index_add_(0, tokens, (linear(hidden, last) * weights).to(total.dtype))
        return total.to(x.dtype).view_as(hidden_states)

    def _run_block(self, block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Output ``(tokens, H)`` and router logits of Llama 4's MoE block.

        The router's weights multiply the inputs of the experts, not the outputs.
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = block.router(x)
        # The router's scores are zero for experts not chosen: these are the scores if chosen.
        weights = logits.float().sigmoid().to(x.dtype)
        total = torch.zeros_like(x, dtype=torch.float32)
        for number, first, last in self._mapped():
            for rows in _pieces(len(x)):
                tokens = scores[rows, number].nonzero()[:, 0]
                weighed = x[rows] * weights[rows, number, None]
                hidden = self._hidden(number, weighed, first, tokens)
                total[rows].index_add_(0, tokens, linear(hidden, last).float())
        return block.shared_expert(x) + total.to(x.dtype), logits

    def _hidden(self, number: int, x: Tensor, first: Tensor, tokens: Tensor) -> Tensor:
        """Input of expert ``number``'s down projection for ``x[tokens]``.

        Maxima, if requested, are recorded over all of ``x``. ``first``: weights of the first
        projections, concatenated.
        """
        if self._found is None:
            return activate(self._module, linear(x[tokens], first))
        hidden = activate(self._module, linear(x, first))
        raise_maximum(self._found, self._layer.linear(number, self._layer.last), hidden)
        self._measure_input(x)
        return hidden[tokens]

    def _measure_input(self, x: Tensor) -> None:
        """Update max|input| of all experts' first projections, one maximum, with max|x|."""
        assert self._found is not None
        name = self._layer.linear(0, self._layer.first[0])
        raise_maximum(self._found, name, x)
        for number in range(len(self._layer.experts)):
            for projection in self._layer.first:
                self._found[self._layer.linear(number, projection)] = self._found[name]

    def _mapped(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Load each expert; yield number, first projections as one matrix, and last projection."""
        for number, expert in enumerate(self._layer.experts):
            *first, last = (
                weight.load(self._source).to(self._device, torch.bfloat16)
                for weight in expert.values()
            )
            yield number, torch.cat(first), last
            if self._found is not None:
                for _ in expert:
                    self._on_linear()


def _pieces(tokens: int) -> Iterator[slice]:
    return (slice(start, start + _PIECE_TOKENS) for start in range(0, tokens, _PIECE_TOKENS))
