"""The modelled time of a decoder layer's prefill on a B200, launch by launch.

    python -m tests.modelled.decoder_prefill                    8192 tokens of Llama 8B, two prompts

Every launch is modelled alone, with all its reads from HBM, plus the gaps between launches: with so
many tokens hardly anything overlaps. CPU time of the launches is left out.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.emulator.timing import B200_TIMING, Timing, chain, extrapolate, model
from tests.modelled import prices, rotary_store
from tests.modelled.attention import Shape as AttentionShape
from tests.modelled.attention import prefill as attention_seconds
from tests.modelled.decoder_models import MODELS, Model
from tests.modelled.launches import VARIANTS, Kind, Step, launches, vllm_launches
from tests.modelled.layer import layers
from tests.modelled.layer_sm100 import ProductsSm100
from tests.modelled.paged import paged
from tests.modelled.traces import Traced, Tracer, aligned, operand

if TYPE_CHECKING:
    from torch import Tensor

    from nvfp4_kernels.attention.sm100.tile import AttentionTile

TURNS = 4, 8  # traced tiles per cluster, where a cluster has more
TRACED_CTAS = 160
EPS = 1e-5
VLLM = "vllm"
# NVIDIA's kernel as `compare` has it, µs of a Llama 8B's products of 8192 tokens; o_proj, which was
# not run, at qkv_proj's rate. gate_up_proj is one product of twice the rows.
NVIDIA_8192 = {"qkv_proj": 63.7, "o_proj": 42.5, "gate_up_proj": 273.0, "down_proj": 124.1}


class Prefill:
    """Times of a layer's launches; a launch whose time is known is not run again."""

    def __init__(self, tracer: Tracer, name: str, prompts: int, length: int) -> None:
        self.model: Model = MODELS[name]
        self.tokens = prompts * length
        self._tracer = tracer
        self._products = ProductsSm100(tracer, self.model.shape(), self.tokens)
        self._prompts, self._length = prompts, length
        self._sizes = self.model.sizes(self.tokens, length)
        self._quantizes = False  # whether attention quantises its result
        self._known: dict[tuple[str, str, bool], float] = {}

    def layer(self, variant: str) -> list[tuple[Step, float]]:
        """Microseconds of each launch, including the gap before it."""
        kind = Kind(decode=False, ranks=self.model.ranks)
        steps = vllm_launches(kind) if variant == VLLM else launches(VARIANTS[variant], kind)
        rows, after_ours = [], steps[-1].by == "ours"
        for step in steps:
            rows.append((step, self._gap(step, after_ours) + self._body(step, variant == VLLM)))
            after_ours = step.by == "ours"
        return rows

    def _gap(self, step: Step, after_ours: bool) -> float:
        p = B200_TIMING
        if step.by == "ours":
            return p.grid_flush if after_ours else p.dependent_launch
        return prices.GAP if step.name in prices.BODIES else p.grid_launch

    def _body(self, step: Step, is_vllm: bool) -> float:
        width = {"attended": self.model.heads * self.model.head_dim}.get(
            step.reads, self.model.intermediate if step.reads == "hidden" else self.model.hidden
        )
        if is_vllm and step.name in NVIDIA_8192:
            return NVIDIA_8192[step.name]
        if step.source != "traced" and step.name != "paged_attention":
            return prices.body(step, self._sizes, width)
        key = step.name, step.reads if step.name == "quantize" else "", step.quantizes
        if key not in self._known:
            self._known[key] = self._traced(step, width)
        return self._known[key]

    def _traced(self, step: Step, width: int) -> float:
        if step.name.endswith("_proj"):
            return self._product(step.name, step.quantizes)
        if step.name == "rotary_store":
            m = self.model
            sizes = m.heads, m.kv_heads, m.head_dim
            traced, _ = rotary_store.traced(self._tracer, self.tokens, m.qk_norm, False, sizes)
            return chain(layers([traced], 1)).microseconds
        if step.name == "paged_attention":
            self._quantizes = step.quantizes
            return self._attention()
        return self._rows(step.name, width)

    def _product(self, name: str, quantizes: bool) -> float:
        turns = self._products.turns(name, quantizes)
        timings = []
        for most in (turns,) if turns <= TURNS[1] else TURNS:
            traced = self._products.product(name, "x", "y", quantizes, most)
            moved = sum(each.total for each in traced.operands) * most / turns
            timings.append(
                model(
                    traced.launch,
                    clusters=traced.clusters,
                    footprint=moved,
                    registers=traced.registers,
                )
            )
        if len(timings) == 1:
            return timings[0].microseconds
        return extrapolate(*timings, (*TURNS, turns)).microseconds

    def _attention(self) -> float:
        from nvfp4_kernels.attention.sm100.choose import choose_config

        m = self.model
        shape = AttentionShape(
            self._prompts, self._length, self._length, m.head_dim,
            kv_heads=m.kv_heads, group=m.heads // m.kv_heads,
        )  # fmt: skip
        tile, splits = choose_config(shape.problem())
        assert splits == 1
        return attention_seconds(self, tile, shape) * 1e6

    def run(self, tile: "AttentionTile", shape: AttentionShape, split: bool) -> Timing:
        """Model one KV head of one sequence."""
        assert not split
        traced = paged(self._tracer, shape, (tile, 1), "q", self._quantizes)
        return model(traced.launch, registers=traced.registers)

    def _rows(self, name: str, width: int) -> float:
        import torch

        from nvfp4_kernels.formats.output import Static
        from nvfp4_kernels.quantize.call import QuantizeCall, RmsNormQuantizeCall
        from nvfp4_kernels.quantize.rms_norm.sm100 import rms_norm_quantize
        from nvfp4_kernels.quantize.sm100 import quantize

        one = torch.tensor(1.0)
        x = self._zeros(width)
        operands = [operand("x", x, x.nbytes)]
        run: Callable[[], object] = partial(quantize, QuantizeCall(x, Static(one)))
        if name == "add_rms_norm_quantize":
            weight = aligned(torch.ones(width, dtype=torch.bfloat16))
            residual = self._zeros(width)
            call = RmsNormQuantizeCall(x, residual, weight, EPS, Static(one))
            run = partial(rms_norm_quantize, call)
            operands.append(operand("residual", residual, residual.nbytes))
            operands.append(operand("weight", weight, weight.nbytes))
        launched, registers = self._tracer.run(run, TRACED_CTAS)
        clusters = math.prod(launched.grid) // launched.cluster_size
        traced = Traced(launched, clusters, tuple(operands), {}, registers)
        return chain(layers([traced], 1)).microseconds

    def _zeros(self, width: int) -> "Tensor":
        import torch

        return aligned(torch.zeros(self.tokens, width, dtype=torch.bfloat16))


def main() -> None:
    """Print a line for each launch, and their sum."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("llama-8b",), default="llama-8b")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096, help="of a prompt")
    names = (*VARIANTS, VLLM)
    parser.add_argument(
        "--variant", choices=names, nargs="+", default=["vllm_rotation", "today", VLLM]
    )
    given = parser.parse_args()
    prefill = Prefill(Tracer("sm_100"), given.model, given.prompts, given.length)
    for name in given.variant:
        start = time.monotonic()
        rows = prefill.layer(name)
        print(
            f"{given.model}, {prefill.tokens} tokens, {name}: {sum(us for _, us in rows):.0f} µs, "
            f"{len(rows)} launches [{time.monotonic() - start:.0f} s]"
        )
        for step, us in rows:
            print(f"    {step.name:25} {step.by:10} {step.source:8} {us:7.1f} µs", flush=True)


if __name__ == "__main__":
    main()
