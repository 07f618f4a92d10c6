"""Pages of a sliding window: a page with a visible key belongs to a single sequence.

Kernels may therefore multiply the values before a window, in the page where the window begins, by
weights of 0: these values are the sequence's own and finite.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

BLOCK_SIZE, BLOCKS = 4, 14
ALPHABET = 2  # prompts begin alike often
Content = dict[int, list[tuple[int, ...] | None]]


@dataclass
class Engine:
    """vLLM's page manager, and a record of the tokens written into each page.

    Attributes:
        manager: page manager of vLLM.
        window: number of keys that a query sees.
        content: for each row of a page, the tokens up to the token whose key the row holds.
        reused: number of prompts that began with pages of other prompts.
        given_away: number of pages that a second sequence wrote.
    """

    manager: Any
    window: int
    content: Content = field(default_factory=dict)
    reused: int = 0
    given_away: int = 0

    def start(self, request: Any) -> None:
        """Find cached pages of a prompt's prefix, and run the first step."""
        found, tokens = self.manager.get_computed_blocks(request)[:2]
        self.reused += tokens > 0
        self.step(request, tokens, found)

    def step(self, request: Any, computed: int = 0, found: Any = None) -> None:
        """Compute up to 7 tokens of a request, and check every row that their queries may read."""
        first = request.num_computed_tokens + computed
        count = min(7, request.num_tokens - first)
        given = self.manager.allocate_slots(request, count, computed, found)
        assert given is not None, "the pool is too small for this test"
        [pages] = self.manager.get_block_ids(request.request_id)
        tokens = tuple(request.all_token_ids)
        for position in range(first, first + count):
            rows = self.content.setdefault(pages[position // BLOCK_SIZE], [None] * BLOCK_SIZE)
            own = tokens[: position + 1]
            self.given_away += rows[position % BLOCK_SIZE] not in (None, own)
            rows[position % BLOCK_SIZE] = own
        seen = max(0, first - self.window + 1)
        for position in range(seen // BLOCK_SIZE * BLOCK_SIZE, first + count):
            rows = self.content[pages[position // BLOCK_SIZE]]
            assert rows[position % BLOCK_SIZE] == tokens[: position + 1]
        request.num_computed_tokens = first + count
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(random.randrange(ALPHABET))


def _engine(window: int) -> Engine:
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    init_none_hash(sha256)
    spec = SlidingWindowSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=torch.bfloat16,
        sliding_window=window,
    )  # fmt: skip
    config = KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)]
    )
    manager = KVCacheManager(config, 64, BLOCK_SIZE, BLOCK_SIZE, max_in_flight_tokens=16)
    return Engine(manager, window)


def _request(number: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    prompt = [random.randrange(ALPHABET) for _ in range(random.choice([3, 9, 17, 22]))]
    if number % 2:
        prompt = [0] * len(prompt)
    options = SamplingParams(max_tokens=20)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return Request(str(number), prompt, options, None, block_hasher=hasher)


def _run(engine: Engine, window: int) -> None:
    """Serve prompts with common prefixes, two at a time, in a pool without room for a third."""
    random.seed(window)
    running: list[Any] = []
    for number in range(60):
        request = _request(number)
        engine.start(request)
        running.append(request)
        for _ in range(8):
            for each in running:
                engine.step(each)
        if len(running) == 2:
            engine.manager.free(running.pop(0))


@pytest.mark.parametrize("window", [2, 4, 5, 9])
def test_pages_with_a_key_that_is_seen_are_a_sequences_own(window: int) -> None:
    engine = _engine(window)
    _run(engine, window)
    assert engine.reused
    assert engine.given_away


@pytest.mark.parametrize("window", [2, 4, 5, 9])
def test_pages_before_them_are_others(window: int) -> None:
    """Mutant: a query that sees one page more finds rows unwritten or of another sequence."""
    engine = _engine(window)
    engine.window += BLOCK_SIZE
    with pytest.raises((AssertionError, KeyError)):
        _run(engine, window)
