"""Launches of a decoder layer on a B200, with traces or with prices."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from tests.emulator.timing import B200_TIMING, OpaqueLink
from tests.emulator.timing.supply import Operand
from tests.modelled import prices, rotary_store
from tests.modelled.attention import Shape as AttentionShape
from tests.modelled.decoder_models import Model
from tests.modelled.experts import GroupedSm100, products
from tests.modelled.experts_rows import RowsSm100
from tests.modelled.launches import Kind, Step, Switches, launches, vllm_launches
from tests.modelled.layer_sm100 import ProductsSm100
from tests.modelled.paged import live_parts, paged
from tests.modelled.traces import Traced, Tracer, aligned, operand

if TYPE_CHECKING:
    from torch import Tensor

    from nvfp4_kernels.attention.sm100.choose import AttentionTile

ELEMENT = 2  # bytes of an activation
EPS = 1e-5
TRACED_CTAS = 160  # per grid of row kernels, at most


class DecoderSm100:
    """Launches of one model's layer for one number of tokens, each token of a different sequence.

    A traced launch is not run again.

    Args:
        tracer: tracer of ``"sm_100"``.
        model: model, as sharded to one GPU.
        tokens: number of tokens of the batch.
        keys: number of keys of each sequence, including the new token.
        known_keys: maximum sequence length given to attention's launch; a captured graph uses the
            model's maximum.
    """

    def __init__(
        self, tracer: Tracer, model: Model, tokens: int, keys: int, known_keys: int
    ) -> None:
        self.model = model
        self.tokens = tokens
        self.keys = keys
        self.known_keys = known_keys
        self._tracer = tracer
        self._products = ProductsSm100(tracer, model.shape(), tokens)
        self._sizes = model.sizes(tokens, keys)
        self._known: dict[Step, Traced] = {}

    @cached_property
    def attention_config(self) -> "tuple[AttentionTile, int]":
        """Tile, and the number of splits of the keys."""
        from nvfp4_kernels.attention.sm100.choose import AttentionProblem, choose_config

        m = self.model
        return choose_config(
            AttentionProblem(
                self.tokens, 1, self.known_keys, m.kv_heads, m.heads // m.kv_heads, m.head_dim
            )
        )

    def kind(self, topk: bool) -> Kind:
        """Parameters of the list of launches; ``topk`` as in ``Switches``."""
        mixture = self.model.experts is not None
        return Kind(
            split=self.attention_config[1] > 1,
            experts=mixture,
            qk_norm=self.model.qk_norm,
            ranks=self.model.ranks,
            few=not mixture or self._mixture.rows.is_one_launch(topk),
        )

    def ours(self, switches: Switches) -> list[tuple[Step, Traced | OpaqueLink]]:
        """Launches of the plugin."""
        steps = launches(switches, self.kind(switches.topk))
        return [(step, self._launch(step)) for step in steps]

    def vllms(self) -> list[tuple[Step, OpaqueLink]]:
        """Launches of vLLM's default, all priced."""
        steps = vllm_launches(replace(self.kind(topk=False), split=False))
        return [(step, self._priced(step)) for step in steps]

    def _launch(self, step: Step) -> Traced | OpaqueLink:
        if step.source != "traced":
            return self._priced(step)
        if step not in self._known:
            self._known[step] = replace(self._traced(step), label=step.name)
        return self._known[step]

    # Priced

    def _priced(self, step: Step) -> OpaqueLink:
        body = prices.body(step, self._sizes, self._width(step))
        is_small = step.name in prices.BODIES
        start = prices.GAP - B200_TIMING.grid_launch if is_small else 0.0
        return OpaqueLink(step.name, start + body, writes=self._written(step))

    def _width(self, step: Step) -> int:
        """Number of elements of a token that a quantising step reads."""
        m = self.model
        widths = {"attended": m.heads * m.head_dim, "hidden": m.intermediate}
        return widths.get(step.reads, m.hidden)

    # Traced

    def _traced(self, step: Step) -> Traced:
        if step.name.startswith("moe_") or (self.model.experts and step.name in _GROUPED):
            traced = self._mixture.traced(step)
        elif step.name.endswith("_proj"):
            traced = self._products.product(step.name, step.reads, step.writes, step.quantizes)
        else:
            make: dict[str, Callable[[Step], Traced]] = {
                "add_rms_norm_quantize": self._norm,
                "quantize": self._quantize,
                "paged_attention": self._attention,
                "rotary_attention": self._attention,
                "merge_segments": self._merge,
                "rotary_store": self._rotary_store,
            }
            traced = make[step.name](step)
        return replace(traced, writes=traced.writes | self._written(step))

    def _written(self, step: Step) -> dict[str, float]:
        """Bytes in L2 after a step, counted as 16-bit results unless they are splits."""
        m = self.model
        if step.writes == "parts":
            return {"parts": 4.0 * self.tokens * m.heads * m.head_dim * self.live_parts}
        width = {
            "qkv": (m.heads + 2 * m.kv_heads) * m.head_dim,
            "rotated": m.heads * m.head_dim,
            "hidden": m.intermediate,
            "hidden in NVFP4": m.intermediate,
            "attended": m.heads * m.head_dim,
            "attended in NVFP4": m.heads * m.head_dim,
        }.get(step.writes, m.hidden)
        results = float(self.tokens * width)
        return {step.writes: results * ELEMENT, f"{step.writes} scales": results / 16}

    @cached_property
    def _mixture(self) -> "Mixture":
        assert self.model.experts is not None
        return Mixture(self._tracer, self.model, self.tokens)

    def _norm(self, step: Step) -> Traced:
        import torch

        from nvfp4_kernels.formats.output import Static
        from nvfp4_kernels.quantize.call import RmsNormQuantizeCall
        from nvfp4_kernels.quantize.rms_norm.sm100 import rms_norm_quantize

        hidden = self.model.hidden
        x, residual = (self._zeros(self.tokens, hidden) for _ in range(2))
        weight = aligned(torch.ones(hidden, dtype=torch.bfloat16))
        call = RmsNormQuantizeCall(x, residual, weight, EPS, Static(torch.tensor(1.0)))
        run = partial(rms_norm_quantize, call)
        nbytes = float(self.tokens * hidden * ELEMENT)
        operands = [operand(step.reads, x, nbytes), operand("residual", residual, nbytes)]
        operands.append(operand("norm weight", weight, weight.nbytes))
        traced = self._rows(run, operands)
        return replace(traced, writes={"residual": nbytes})

    def _quantize(self, step: Step) -> Traced:
        import torch

        from nvfp4_kernels.formats.output import Static
        from nvfp4_kernels.quantize.call import QuantizeCall
        from nvfp4_kernels.quantize.sm100 import quantize

        x = self._zeros(self.tokens, self._width(step))
        run = partial(quantize, QuantizeCall(x, Static(torch.tensor(1.0))))
        return self._rows(run, [operand(step.reads, x, x.nbytes)])

    def _rotary_store(self, step: Step) -> Traced:
        m = self.model
        sizes = m.heads, m.kv_heads, m.head_dim
        traced, _ = rotary_store.traced(self._tracer, self.tokens, m.qk_norm, False, sizes)
        [qkv, *others] = traced.operands
        operands = replace(qkv, name=step.reads), *others
        # All layers read the same operand, so that L2 still holds it.
        return replace(traced, operands=operands, writes={each.name: each.total for each in others})

    def _attention(self, step: Step) -> Traced:
        m = self.model
        shape = AttentionShape(
            self.tokens, 1, self.keys, m.head_dim, kv_heads=m.kv_heads, group=m.heads // m.kv_heads
        )
        config = self.attention_config
        rotates = "" if step.name == "paged_attention" else "norm" if m.qk_norm else "plain"
        return paged(self._tracer, shape, config, step.reads, step.quantizes, step.merges, rotates)

    def _merge(self, step: Step) -> Traced:
        import torch

        from nvfp4_kernels.attention.merge.sm100 import merge_segments
        from nvfp4_kernels.formats.nvfp4_rows import Nvfp4Rows, new_nvfp4_rows

        m, splits = self.model, self.attention_config[1]
        rows = self.tokens, m.heads
        outs = aligned(torch.zeros(splits, *rows, m.head_dim))
        lses = aligned(torch.zeros(splits, *rows))
        live = self.live_parts
        lses[live:] = -math.inf
        rows_out = None
        if step.quantizes:
            rows_out = Nvfp4Rows(*map(aligned, new_nvfp4_rows(outs[0])), torch.tensor(1.0))
        run = partial(merge_segments, outs, lses, None, torch.bfloat16, rows_out)
        read = operand(step.reads, outs, outs.nbytes * live / splits)
        return self._rows(run, [read])

    @property
    def live_parts(self) -> int:
        """Number of splits of a sequence that hold any keys."""
        return live_parts(self.keys, self.attention_config[1])

    def _zeros(self, *shape: int) -> "Tensor":
        import torch

        return aligned(torch.zeros(*shape, dtype=torch.bfloat16))

    def _rows(self, run: Callable[[], object], operands: list[Operand]) -> Traced:
        launched, registers = self._tracer.run(run, TRACED_CTAS)
        clusters = math.prod(launched.grid) // launched.cluster_size
        return Traced(launched, clusters, tuple(operands), {}, registers)


_GROUPED = ("gate_up_proj", "down_proj")


class Mixture:
    """Traced launches of a mixture of experts."""

    def __init__(self, tracer: Tracer, model: Model, tokens: int) -> None:
        from nvfp4_kernels.gemm.sm100.choose_grouped import choose_tile_tokens

        assert model.experts is not None
        e = self._shape = model.experts
        tile_tokens = choose_tile_tokens(
            tokens, e.top_k, e.local, e.experts, e.intermediate, e.hidden
        )
        self.rows = RowsSm100(tracer, e, tokens, tile_tokens)
        self._grouped = GroupedSm100(tracer)
        self._products = products(e, tokens, tile_tokens)

    def traced(self, step: Step) -> Traced:
        """Traced launch of a step."""
        from nvfp4_kernels.gemm.sm100.choose_grouped import choose_grouped
        from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig

        if step.name in _GROUPED:
            number = _GROUPED.index(step.name)
            product = self._products[number]
            output = EpilogueConfig("nvfp4" if step.quantizes else "bfloat16")
            tile, output = choose_grouped(product.problem, output)
            if number == 1:  # the second product may load weights while the first ends
                tile = replace(tile, routed_before=True)
            return self._grouped.traced(product, (tile, output), step.reads, step.writes)
        if step.name in ("moe_topk", "moe_route"):
            return self.rows.topk() if step.name == "moe_topk" else self.rows.route()
        make = {
            "moe_topk_route_quantize": self.rows.topk_route_quantize,
            "moe_route_quantize": self.rows.route_quantize,
            "moe_quantize": self.rows.quantize,
            "moe_combine": self.rows.combine,
        }[step.name]
        return make(step.reads, step.writes)
