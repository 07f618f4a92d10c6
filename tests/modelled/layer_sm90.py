"""Traced launches of a decode layer on Hopper: weight-only products, attention, norms, rotation."""

import math
from typing import TYPE_CHECKING

from tests.modelled.traces import Traced, Tracer, operand

if TYPE_CHECKING:
    from examples.kernel_bench.layer import Shape

ELEMENT = 2  # bytes of an activation
PAGE = 16  # keys
EPS = 1e-5


class LayerSm90:
    """Launches of one model's layer for one number of tokens.

    Args:
        tracer: tracer of ``"sm_90"``.
        shape: sizes of the model's layers.
        tokens: number of sequences, with one token each.
        keys: number of keys of each sequence.
    """

    def __init__(self, tracer: Tracer, shape: "Shape", tokens: int, keys: int) -> None:
        self._tracer = tracer
        self._shape = shape
        self._tokens = tokens
        self._keys = keys

    def product(self, name: str, read: str, written: str) -> Traced:
        """Traced launch of a linear layer, or of gate and up projection with SiLU-mul.

        Args:
            name: ``"qkv_proj"``, ``"o_proj"``, ``"gate_up_proj"`` or ``"down_proj"``.
            read: name of the input.
            written: name of the result.
        """
        import torch

        from nvfp4_kernels.formats.fragments import fragment_shapes
        from nvfp4_kernels.gemm.sm90.choose import Problem, choose_config, ctas
        from nvfp4_kernels.gemm.sm90.kernel import GemmArguments, WeightOnlyGemm
        from nvfp4_kernels.gemm.sm90.tile import SLICED_TOKENS, EpilogueConfig
        from nvfp4_kernels.runtime.compile import launch
        from nvfp4_kernels.sm90.limits import SMS

        n, k, weights = self._shape.product(name)
        problem = Problem(self._tokens, n, k, weights)
        tile, output = choose_config(problem, EpilogueConfig())
        total = ctas(problem, tile) // tile.split_k
        clusters, turns, each = total, 1, 1
        if tile.parts == 1:  # persistent: as many clusters as SMs hold, with several tiles each
            clusters = min(total, SMS * tile.ctas_per_sm)
            turns, each = math.ceil(total / clusters), tile.ctas_per_sm
        rows = turns * each * tile.rows
        m = min(self._tokens, tile.tokens)
        x = torch.zeros(m, k, dtype=torch.bfloat16)
        out = torch.zeros(m, rows, dtype=torch.bfloat16)
        data, scales = fragment_shapes(rows, k)
        parts = [
            [torch.zeros(data, dtype=torch.uint8), torch.zeros(scales, dtype=torch.uint8)]
            for _ in range(weights)
        ]
        arguments = GemmArguments(
            x=x,
            w1=parts[0][0],
            sfw1=parts[0][1],
            w2=parts[-1][0],
            sfw2=parts[-1][1],
            out=out,
            alpha=torch.ones(2),
            bias=None,
            m=m,
            n=rows,
            k=k,
            sms=1,
            shard_ends=(0,) * 7,
        )
        traced, registers = self._tracer.run(
            lambda: launch(WeightOnlyGemm(tile, output), arguments)
        )
        fraction = rows / n
        streamed = tile.tokens <= SLICED_TOKENS  # the loader's hint
        operands = [operand(read, x, self._tokens * k * ELEMENT)]
        for number, pair in enumerate(parts):
            for kind, tensor in zip(("data", "scales"), pair, strict=True):
                label = f"{name} {kind} {number}"
                operands.append(operand(label, tensor, tensor.nbytes / fraction, streamed))
        writes = {written: float(self._tokens * n * ELEMENT)}
        return Traced(traced, clusters, tuple(operands), writes, registers)

    def norm(self, read: str, written: str) -> Traced:
        """Traced launch of the residual sum and norm."""
        import torch

        from nvfp4_kernels import add_rms_norm

        hidden, tokens = self._shape.hidden, self._tokens
        x, residual = (torch.zeros(1, hidden, dtype=torch.bfloat16) for _ in range(2))
        weight = torch.ones(hidden, dtype=torch.bfloat16)
        traced, registers = self._tracer.run(lambda: add_rms_norm(x, residual, weight, EPS))
        nbytes = float(tokens * hidden * ELEMENT)
        operands = (
            operand(read, x, nbytes),
            operand("residual", residual, nbytes),
            operand(f"{written} weight", weight, hidden * ELEMENT),
        )
        return Traced(traced, tokens, operands, {written: nbytes, "residual": nbytes}, registers)

    def rotation(self) -> Traced:
        """Traced launch of the rotary embedding of queries and keys."""
        import torch

        from nvfp4_kernels import rotary_embedding

        shape, tokens = self._shape, self._tokens
        heads = shape.heads + 2 * shape.kv_heads
        qkv = torch.zeros(1, heads, shape.head_dim, dtype=torch.bfloat16)
        q, key, _ = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        positions = torch.zeros(1, dtype=torch.int64)
        cos_sin = torch.zeros(self._keys, shape.head_dim, dtype=torch.bfloat16)
        traced, registers = self._tracer.run(lambda: rotary_embedding(positions, q, key, cos_sin))
        nbytes = float(tokens * heads * shape.head_dim * ELEMENT)
        operands = (operand("qkv", qkv, nbytes),)
        return Traced(traced, tokens * traced.clusters, operands, {"rotated": nbytes}, registers)

    def attention(self) -> Traced:
        """Traced decode attention over a paged cache, with the store of the new key and value."""
        import torch

        from nvfp4_kernels.attention.decode.sm90.choose import choose_config
        from nvfp4_kernels.attention.decode.sm90.kernel import DecodeArguments, DecodeAttentionSm90
        from nvfp4_kernels.attention.decode.sm90.loader import Strides
        from nvfp4_kernels.attention.decode.sm90.mainloop import LogitScaling
        from nvfp4_kernels.attention.decode.sm90.merge import DecodeResult
        from nvfp4_kernels.attention.decode.sm90.tile import Variant
        from nvfp4_kernels.attention.decode.sm90.token import TokenTensor
        from nvfp4_kernels.runtime.compile import launch

        shape, tokens, keys = self._shape, self._tokens, self._keys
        head_dim, group = shape.head_dim, shape.heads // shape.kv_heads
        pages = -(-keys // PAGE)
        tile = choose_config(tokens, shape.kv_heads, group, head_dim, pages * PAGE)
        qkv = torch.zeros(group + 2, head_dim, dtype=torch.bfloat16)
        cache = torch.zeros(pages, 1, PAGE, 2 * head_dim, dtype=torch.bfloat16)
        row = (group + 2) * head_dim
        page, head, line, _ = cache.stride()
        out = torch.zeros(1, group, head_dim, dtype=torch.bfloat16)
        arguments = DecodeArguments(
            q=TokenTensor(qkv[:group], token_stride=row, head_stride=head_dim),
            key=TokenTensor(qkv[group:], token_stride=row, head_stride=head_dim),
            value=TokenTensor(qkv[group + 1 :], token_stride=row, head_stride=head_dim),
            kv_cache=cache,
            cache_strides=Strides(row=line, head=head, page=page),
            block_table=torch.arange(pages, dtype=torch.int32).view(1, -1),
            table_stride=pages,
            seq_lens=torch.tensor([keys], dtype=torch.int32),
            slot_mapping=torch.tensor([keys - 1]),
            result=DecodeResult(out, None),
            logits=LogitScaling(1.0, 0.0),
            window=0,
            batch=1,
            kv_heads=1,
            pages=pages,
        )
        variant = Variant("bfloat16", PAGE)
        traced, registers = self._tracer.run(
            lambda: launch(DecodeAttentionSm90(tile, variant), arguments)
        )
        clusters = tokens * shape.kv_heads
        operands = (
            operand("rotated", qkv, float(clusters * qkv.nbytes)),
            operand("cache", cache, float(clusters * cache.nbytes)),
        )
        writes = {"attended": float(clusters * out.nbytes)}
        return Traced(traced, clusters, operands, writes, registers)
