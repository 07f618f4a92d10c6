"""Traced launches of paged attention as in the plugin, for a few KV heads of a few sequences."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from unittest.mock import patch

from nvfp4_kernels.devices import device_facts
from tests.modelled.traces import Traced, Tracer, aligned, operand

if TYPE_CHECKING:
    from nvfp4_kernels.attention.sm100.tile import AttentionTile
    from tests.modelled.attention import Shape

PAGE = 16  # keys
EPS = 1e-6
KEY_TILE = 128
MOST_CTAS = 8  # per trace of persistent CTAs


def live_parts(keys: int, parts: int) -> int:
    """Number of splits of a sequence that hold any keys."""
    tiles = math.ceil(keys / KEY_TILE)
    return math.ceil(tiles / math.ceil(tiles / parts))


@dataclass(frozen=True)
class Walk:
    """Traced launch that represents a larger launch whose CTAs take several work tiles.

    Attributes:
        sequences: number of traced sequences, with one KV head each.
        ctas: number of persistent CTAs for the sequences; 0: one CTA per work tile.
        clusters: number of clusters of the whole grid.
        repeats: see ``Traced``.
    """

    sequences: int
    ctas: int
    clusters: int
    repeats: tuple[int, ...] = ()


def walk(heads: int, parts: int, places: int, at_once: int) -> Walk:
    """Walk that represents the grid of a launch.

    Args:
        heads: number of KV heads of all sequences together.
        parts: number of splits of the keys of each head.
        places: number of CTAs that the chip holds at once.
        at_once: number of CTAs that an SM holds at once.
    """
    works = heads * parts
    if works <= places:
        return Walk(1, 0, works, tuple(n // heads for n in range(works)))
    each, more = divmod(works, places)
    found = []
    for ctas in range(at_once, MOST_CTAS + 1, at_once):
        sequences = max(1, round(works / places * ctas / parts))
        has_more = sequences * parts - each * ctas  # the first CTAs have one work tile more
        if 0 <= has_more <= ctas:
            found.append((abs(has_more / ctas - more / places), ctas, sequences, has_more))
    _, ctas, sequences, has_more = min(found)
    longer, shorter = range(has_more or ctas), range(has_more % ctas, ctas)
    repeats = [longer[n % len(longer)] for n in range(more)]
    repeats += [shorter[n % len(shorter)] for n in range(places - more)]
    return Walk(sequences, ctas, places, tuple(repeats))


def paged(
    tracer: Tracer,
    shape: "Shape",
    config: "tuple[AttentionTile, int]",
    read: str,
    quantizes: bool = False,
    merges: bool = False,
    rotates: Literal["", "plain", "norm"] = "",
) -> Traced:
    """Traced launch of attention: only the CTAs of one KV head and sequence, or a few, run.

    The last CTAs run first: they have no keys and are done first on a GPU too, so that a CTA with
    keys merges.

    Args:
        tracer: tracer of ``"sm_100"``.
        shape: shape of the sequences.
        config: tile, and number of splits of each sequence's keys.
        read: name of the operand with the queries.
        quantizes: whether the result is NVFP4.
        merges: whether the last CTA merges the splits; otherwise another launch, left out here,
            does.
        rotates: whether attention rotates queries and new keys, normed by head or plain, and
            stores.
    """
    import torch

    from nvfp4_kernels.attention.call import PagedCall, RotaryCall
    from nvfp4_kernels.attention.sm100 import launch
    from nvfp4_kernels.attention.sm100.launch_rotary import rotary_attention
    from nvfp4_kernels.formats.nvfp4_rows import Nvfp4Rows, new_nvfp4_rows
    from nvfp4_kernels.sm100.limits import SMS

    tile, parts = config
    at_once = tile.ctas_per_sm
    traced_walk = walk(shape.batch * shape.kv_heads, parts, SMS * at_once, at_once)
    batch = traced_walk.sequences
    pages, heads, head_dim = -(-shape.keys // PAGE), shape.group, shape.head_dim
    qkv = aligned(torch.zeros(batch * shape.queries, heads + 2, head_dim, dtype=torch.bfloat16))
    q, k, v = qkv.split((heads, 1, 1), 1)
    cache = aligned(torch.zeros(batch * pages, 1, PAGE, 2 * head_dim, dtype=torch.bfloat16))
    table = torch.randperm(batch * pages, dtype=torch.int32).view(batch, pages)
    lens = torch.tensor([shape.keys] * batch, dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * shape.queries
    counters = torch.zeros(batch, dtype=torch.int32) if merges else None
    out: torch.Tensor | Nvfp4Rows = aligned(torch.zeros_like(q))
    if quantizes:
        out = Nvfp4Rows(*map(aligned, new_nvfp4_rows(q)), torch.tensor(1.0))
    places = table[:, -1].long() * PAGE + PAGE - 1, torch.tensor([shape.keys - 1] * batch)
    turns = aligned(torch.zeros(shape.keys, head_dim, dtype=torch.bfloat16))
    norm = aligned(torch.ones(head_dim, dtype=torch.bfloat16)) if rotates == "norm" else None
    sizes = shape.queries, shape.keys

    def plain() -> object:
        scales = None, None, None
        scoring = 0.1, True, None, None
        return launch.paged_attention(
            PagedCall(
                q, cache, table, lens, starts, *scales, *sizes, *scoring, counters, False, out
            )
        )

    def rotating() -> object:
        memory = (out.data, out.scales) if isinstance(out, Nvfp4Rows) else (out, None)
        input_scale = out.global_scale if isinstance(out, Nvfp4Rows) else None
        return rotary_attention(
            RotaryCall(
                *memory, q, k, v, cache, table, lens, starts, *places, turns, norm, norm, None,
                None, None, input_scale, True, EPS if norm is not None else None, 0, *sizes, 0.1,
                None, None, counters, True, False,
            )
        )  # fmt: skip

    sms = (traced_walk.ctas or SMS) // at_once
    with (
        patch.object(launch, "choose_config", lambda *_: config),
        patch.object(launch, "merge_segments", lambda *_: (q, q)),
        patch.object(launch, "device_facts", lambda device: device_facts(device)._replace(sms=sms)),
    ):
        traced, registers = tracer.run(rotating if rotates else plain, backwards=True)
    repeated = shape.batch * shape.kv_heads / batch
    operands = (
        operand(read, qkv, repeated * (qkv if rotates else q).nbytes),
        operand("cache", cache, repeated * cache.nbytes),
    )
    return Traced(traced, traced_walk.clusters, operands, {}, registers, traced_walk.repeats)
