"""Mutants of the attention reference: each fails the tests listed with it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels.attention import reference
from nvfp4_kernels.attention.call import PagedCall
from nvfp4_kernels.attention.reference import KeyValues, Tile
from nvfp4_kernels.attention.scoring import Scoring
from tests.mutants import Check, Mutant
from tests.mutants.kernels import check_noticed, each_test
from tests.test_kernels.attention import test_attention
from tests.test_kernels.attention.attention_cases import CASES, LARGE_CASES

attend, attend_tiles, tiles_of = reference.attend, reference._attend_tiles, reference._tiles
bias_of, paged_attention = reference._bias, reference.paged_attention


def scored(**changes: Callable[[Scoring], Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Mutant: the reference with another scoring."""

    def mutant(*arguments: Any, **rest: Any) -> tuple[Tensor, Tensor]:
        *others, scoring = arguments
        changed = replace(scoring, **{name: change(scoring) for name, change in changes.items()})
        return attend(*others, changed, **rest)

    return mutant


def finished(
    change: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Mutant: the reference with changed float32 results."""

    def mutant(
        q: Tensor, key_values: KeyValues, tiles: list[Tile], sinks: Tensor | None, scoring: Scoring
    ) -> tuple[Tensor, Tensor]:
        return change(*attend_tiles(q, key_values, tiles, sinks, scoring), sinks)

    return mutant


def moved(by: Callable[[Tile], int]) -> Callable[..., Any]:
    """Mutant: the reference with queries at other positions."""

    def mutant(*arguments: Any) -> Any:
        for tile in tiles_of(*arguments):
            yield replace(tile, position=tile.position + by(tile))

    return mutant


def top_left(starts: list[int], lengths: list[int], *rest: Any) -> Any:
    """Mutant: top-left causal mask, so that the first query sees the first key only."""
    for tile in tiles_of(starts, lengths, *rest):
        yield replace(tile, position=tile.row - starts[tile.sequence])


def paged(**changes: Callable[[dict[str, Any]], Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Mutant: the reference with other arguments."""

    def mutant(call: PagedCall) -> tuple[Tensor, Tensor]:
        named = call._asdict()
        return paged_attention(call._replace(**{n: c(named) for n, c in changes.items()}))

    return mutant


def sink_with_a_value(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    if sinks is None:
        return out, lse
    return out + (sinks - lse).exp().unsqueeze(-1), lse


def sink_outside_of_the_sum(
    out: Tensor, lse: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    if sinks is None:
        return out, lse
    share = 1 - (sinks - lse).exp()
    return out / share.unsqueeze(-1), lse


def lse_without_sink(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    return out, lse if sinks is None else (lse.exp() - sinks.exp()).log()


def no_rescaling(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Mutant: never rescale to a running maximum; each block of keys uses its own."""
    exp2_ = Tensor.exp2_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "exp2_", lambda x: exp2_(x) if x.shape[-1] > 1 else x.fill_(1))
        return attend_tiles(*arguments)


def heads_dealt_out(
    q: Tensor, key_values: KeyValues, *rest: Any, **more: Any
) -> tuple[Tensor, Tensor]:
    """Mutant: query head h attends to key head h % Hkv."""
    heads = key_values.heads
    order = torch.arange(q.shape[1]).view(-1, heads).T.flatten()
    out, lse = attend(q[:, order], key_values, *rest, **more)
    back = order.argsort()
    return out[:, back], lse[:, back]


def soft_cap_before_scale(*arguments: Any) -> tuple[Tensor, Tensor]:
    *others, scoring = arguments
    if scoring.soft_cap is not None:
        scoring = replace(scoring, scale=1.0)
    return attend_tiles(*others, scoring)


def one_after_the_other(arguments: dict[str, Any]) -> Tensor:
    """Block table in which every sequence has consecutive pages."""
    table = arguments["block_table"]
    return (table[:, :1] + torch.arange(table.shape[1])) % len(arguments["kv_cache"])


def no_bias(tiles: list[Tile], start: int, keys: int, scoring: Scoring) -> None:
    return None


def swapped(block: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *arguments: block(*arguments)[::-1]


def replaced(name: str, value: object, tests: tuple[Check, ...]) -> Mutant:
    return Mutant.replaced(reference, name, value, tests)


def on_pages(*names: str) -> tuple[Callable[[], None], ...]:
    cases = CASES | LARGE_CASES
    return tuple(partial(test_attention.test_paged, cases[name]) for name in names)


def ragged(name: str) -> Callable[[], None]:
    return partial(test_attention.test_ragged, name)


PAGED = reference.PagedKeyValues
MUTANTS = {
    "window one too wide": replaced(
        "attend",
        scored(window=lambda s: s.window and s.window + 1),
        (*on_pages("window", "window of one", "long window"), ragged("window")),
    ),
    "window one too narrow": replaced(
        "attend",
        scored(window=lambda s: s.window and max(1, s.window - 1)),
        (*on_pages("window", "window of a page"), ragged("everything")),
    ),
    "window left out": replaced(
        "attend", scored(window=lambda _: None), on_pages("window", "everything")
    ),
    "causal aligned to the first key": replaced(
        "_tiles",
        top_left,
        (*on_pages("after a prefix", "mixed", "more queries than keys"), ragged("mixed")),
    ),
    "the next key seen": replaced(
        "_tiles", moved(lambda _: 1), (*on_pages("prefill", "mixed"), ragged("prefill of two"))
    ),
    "its own key not seen": replaced(
        "_tiles", moved(lambda _: -1), (*on_pages("one token", "decode", "prefill"),)
    ),
    "causal left out": replaced(
        "attend", scored(causal=lambda _: False), on_pages("prefill", "long prefill")
    ),
    "scale applied twice": replaced(
        "attend",
        scored(scale=lambda s: s.scale**2),
        (*on_pages("decode", "large scale", "fp8"), ragged("mixed")),
    ),
    "soft cap before scale": replaced(
        "_attend_tiles", soft_cap_before_scale, on_pages("soft cap", "everything")
    ),
    "soft cap left out": replaced(
        "attend", scored(soft_cap=lambda _: None), on_pages("soft cap", "fp8 everything")
    ),
    "LSE of base 2": replaced(
        "_attend_tiles",
        finished(lambda out, lse, _: (out, lse * reference.LOG2_E)),
        (*on_pages("decode", "sinks"), ragged("prefill")),
    ),
    "sink with a value": replaced(
        "_attend_tiles", finished(sink_with_a_value), on_pages("sinks", "no keys but sinks")
    ),
    "sink outside of the sum": replaced(
        "_attend_tiles", finished(sink_outside_of_the_sum), on_pages("sinks", "everything")
    ),
    "LSE without the sink": replaced(
        "_attend_tiles", finished(lse_without_sink), on_pages("sinks", "no keys but sinks")
    ),
    "sinks of the neighbouring head": replaced(
        "paged_attention",
        paged(sinks=lambda a: a["sinks"] if a["sinks"] is None else a["sinks"].roll(1)),
        on_pages("sinks", "everything"),
    ),
    "blocks not rescaled": replaced(
        "_attend_tiles", no_rescaling, on_pages("long decode", "long prefill after a prefix")
    ),
    "heads dealt out": replaced(
        "attend", heads_dealt_out, (*on_pages("decode", "groups of 8"), ragged("mixed"))
    ),
    "pages one after the other": replaced(
        "paged_attention",
        paged(block_table=one_after_the_other),
        on_pages("decode", "prefill", "long decode"),
    ),
    "key scale left out": replaced(
        "paged_attention", paged(k_scale=lambda _: None), on_pages("fp8", "fp8 everything")
    ),
    "value scale left out": replaced(
        "paged_attention", paged(v_scale=lambda _: None), on_pages("fp8", "long fp8")
    ),
    "key scale for values": replaced(
        "paged_attention", paged(v_scale=lambda a: a["k_scale"]), on_pages("fp8", "fp8 everything")
    ),
    "keys and values exchanged": Mutant.replaced(
        PAGED, "block", swapped(PAGED.block), on_pages("decode", "fp8")
    ),
    "keys past the end": replaced(
        "_bias", no_bias, (*on_pages("decode", "mixed"), ragged("mixed"))
    ),
    "garbage not cleared": replaced("_clear", lambda *_: None, on_pages("mixed", "fp8")),
    "a row without keys": replaced("LOWEST", -torch.inf, on_pages("more queries than keys")),
}


@each_test(MUTANTS)
def test_mutant_is_found(mutant: Mutant, test: Check) -> None:
    check_noticed(mutant, test)
