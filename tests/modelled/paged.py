"""Traced launches of paged attention as the plugin makes them: one KV head of one sequence."""

import math
from typing import TYPE_CHECKING, Literal
from unittest.mock import patch

from tests.modelled.traces import Traced, Tracer, aligned, operand

if TYPE_CHECKING:
    from nvfp4_kernels.attention.sm100.tile import AttentionTile
    from tests.modelled.attention import Shape

PAGE = 16  # keys
EPS = 1e-6
KEY_TILE = 128


def live_parts(keys: int, parts: int) -> int:
    """Parts of a sequence that hold keys."""
    tiles = math.ceil(keys / KEY_TILE)
    return math.ceil(tiles / math.ceil(tiles / parts))


def paged(
    tracer: Tracer,
    shape: "Shape",
    config: "tuple[AttentionTile, int]",
    read: str,
    quantizes: bool = False,
    merges: bool = False,
    rotates: Literal["", "plain", "norm"] = "",
) -> Traced:
    """A launch of attention, of whose grid the CTAs of one KV head and sequence run.

    The last CTAs run first: those without keys, which are done first on a GPU too, so that one with
    keys merges.

    Args:
        tracer: for ``"sm_100"``.
        shape: of the sequences.
        config: tile, and parts of each sequence's keys.
        read: name of what holds the queries.
        quantizes: the result is NVFP4.
        merges: the last CTA merges the parts; else another launch, which is left out, does so.
        rotates: it rotates queries and new keys, normed by head or plain, and stores.
    """
    import torch

    from nvfp4_kernels.attention.scoring import Scoring
    from nvfp4_kernels.attention.sm100 import launch
    from nvfp4_kernels.attention.sm100.launch_rotary import rotary_attention
    from nvfp4_kernels.nvfp4_rows import Nvfp4Rows, new_nvfp4_rows

    pages, heads, head_dim = -(-shape.keys // PAGE), shape.group, shape.head_dim
    qkv = aligned(torch.zeros(shape.queries, heads + 2, head_dim, dtype=torch.bfloat16))
    q, k, v = qkv.split((heads, 1, 1), 1)
    cache = aligned(torch.zeros(pages, 1, PAGE, 2 * head_dim, dtype=torch.bfloat16))
    table = torch.randperm(pages, dtype=torch.int32).unsqueeze(0)
    lens = torch.tensor([shape.keys], dtype=torch.int32)
    starts = torch.tensor([0, shape.queries], dtype=torch.int32)
    counters = torch.zeros(1, dtype=torch.int32) if merges else None
    scoring = Scoring(scale=0.1, causal=True, window=None, soft_cap=None)
    out: torch.Tensor | Nvfp4Rows = aligned(torch.zeros_like(q))
    if quantizes:
        out = Nvfp4Rows(*map(aligned, new_nvfp4_rows(q)), torch.tensor(1.0))
    places = torch.tensor([int(table[0, -1]) * PAGE + PAGE - 1]), torch.tensor([shape.keys - 1])
    turns = aligned(torch.zeros(shape.keys, head_dim, dtype=torch.bfloat16))
    norm = aligned(torch.ones(head_dim, dtype=torch.bfloat16)) if rotates == "norm" else None
    sizes = shape.queries, shape.keys

    def plain() -> object:
        return launch.paged_attention(
            q, cache, table, lens, starts, None, None, None, *sizes, scoring, counters, out
        )

    def rotating() -> object:
        return rotary_attention(
            q, k, v, cache, table, lens, starts, *places, turns, norm, norm, None, None, None,
            True, EPS if norm is not None else None, *sizes, scoring, counters, out,
        )  # fmt: skip

    with (
        patch.object(launch, "choose_config", lambda *_: config),
        patch.object(launch, "merge_segments", lambda *_: (q, q)),
    ):
        traced, registers = tracer.run(rotating if rotates else plain, backwards=True)
    clusters = shape.batch * shape.kv_heads
    operands = (
        operand(read, qkv, float(clusters * (qkv if rotates else q).nbytes)),
        operand("cache", cache, float(clusters * cache.nbytes)),
    )
    return Traced(traced, clusters * traced.clusters, operands, {}, registers)
