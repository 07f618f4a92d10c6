"""``decode_attention``: reference, arguments, and the kernel of sm_90 against the formula."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, decode_attention, paged_attention
from nvfp4_kernels.attention.decode.kernels import DECODE_KERNELS
from nvfp4_kernels.attention.decode.sm90.choose import choose_config
from tests.test_kernels.attention.attention_cases import (
    BF16,
    FP16,
    NO_PAGE,
    check_values,
    small_weights,
    unseen,
    with_pages_of_nan,
)
from tests.test_kernels.attention.decode.decode_cases import (
    ALL_CASES,
    CASES,
    EVERY_CASE,
    Case,
    arguments,
    case,
    check_kernel,
    p_dtype,
    same_bits,
    stored,
)
from tests.test_kernels.attention.decode.decode_shapes import SHAPES, Chosen
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.rounds import decode_sm90

pytestmark = pytest.mark.arch("sm_90")
ONE_SCHEDULE = pytest.mark.schedules("random 1")
FP8_TOO = pytest.mark.parametrize("fp8", [False, True], ids=["", "E4M3"])
CPU = torch.device("cpu")


# --- the kernel ---------------------------------------------------------------------------------


@ONE_SCHEDULE
@EVERY_CASE
def test_kernel(given: Case, op_device: torch.device) -> None:
    check_kernel(given, op_device)


@pytest.mark.parametrize(
    "name",
    [e4m3 + name for e4m3 in ("", "E4M3, ") for name in ("everything", "groups of 4, D = 128")],
)
def test_every_schedule(name: str, op_device: torch.device) -> None:
    check_kernel(ALL_CASES[name], op_device)


@FP8_TOO
@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@ONE_SCHEDULE
def test_splits(
    splits: int, stages: int, fp8: bool, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences wrap around their rings several times, or are too short to use all rings."""
    Chosen(splits, max_stages=stages).use(monkeypatch)
    rounds = 4 * splits * 16 * (stages + 1)
    given = case(min(rounds, 400), 17, 0, 64, query_heads=6, heads=2, sinks=True, fp8=fp8)
    check_kernel(given, op_device)


@FP8_TOO
@pytest.mark.parametrize("name", SHAPES)
@ONE_SCHEDULE
def test_shapes(
    name: str, fp8: bool, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, given = SHAPES[name]
    chosen.use(monkeypatch)
    check_kernel(replace(given, fp8=fp8), op_device)


@pytest.mark.parametrize("splits", [False, True], ids=["alone", "splits"])
def test_rings_go_round(splits: bool) -> None:
    """Some shape wraps around its rings often enough, with one split and with several."""
    rounds = [
        decode_sm90(chosen(1, 1, given.query_heads // given.heads, given.head_dim), max(given.keys))
        for chosen, given in SHAPES.values()
        if splits == (chosen.splits > 1) and given.window is None
    ]
    assert any(each.enough for each in rounds), rounds


@pytest.mark.parametrize("k_scale", [0.37, 2.0**-126, 3e30])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@ONE_SCHEDULE
def test_new_tokens_are_stored_as_the_reference_stores_them(
    dtype: torch.dtype, k_scale: float, op_device: torch.device
) -> None:
    """Ties, subnormals, saturated and zero elements, to the bit."""
    given = arguments(case(3, 33, heads=1, dtype=dtype, fp8=True).problem(), CPU)
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = torch.cat([codes, codes[:-1] + codes.diff() / 2, codes[-1:] * 2, -codes])[:256]
    scale = torch.tensor(k_scale)
    rows = (between.view(2, 1, 2, 64) * min(k_scale, 1.0)).to(dtype)
    new = {"key": rows[:, :, 0], "value": rows[:, :, 1], "k_scale": scale, "v_scale": scale}
    given |= new | {"q": given["q"].zero_()}
    expected = given | {"kv_cache": given["kv_cache"].clone()}
    decode_attention(**expected)
    given = {n: x.to(op_device) if isinstance(x, Tensor) else x for n, x in given.items()}
    decode_attention(**given)
    assert same_bits(given["kv_cache"].cpu(), expected["kv_cache"])


@pytest.mark.parametrize("size", [0.0, 1e-38, 2.0**-100, 1e-6, 1.0, 1e5, 1e30, 5e37])
@ONE_SCHEDULE
def test_bfloat16_queries_of_any_size(size: float, op_device: torch.device) -> None:
    """Queries too large or too small for float16 are as exact as others, with E4M3 keys."""
    given = case(40, 5, query_heads=12, heads=1, fp8=True, scale=0.1 / max(size, 1e-30))
    problem = given.problem()
    problem.q.mul_(size * 0.3)
    problem.q[:, 1] *= 1e-3  # heads have scales of their own
    out = decode_attention(**arguments(problem, op_device)).cpu()
    check_values(out, problem, torch.finfo(FP16).eps / 2)


@FP8_TOO
@ONE_SCHEDULE
def test_small_weights_of_many_keys_count(fp8: bool, op_device: torch.device) -> None:
    problem = small_weights(1, 1025, fp8)
    out = decode_attention(**arguments(problem, op_device)).cpu()
    check_values(out, problem, torch.finfo(FP16).eps / 2)
    assert out.min() > 1e-3


@ONE_SCHEDULE
def test_same_bits_again(op_device: torch.device) -> None:
    problem = CASES["more than a round"].problem()
    given = arguments(problem, op_device)
    again = given | {"kv_cache": given["kv_cache"].clone()}
    assert same_bits(decode_attention(**given), decode_attention(**again))


@ONE_SCHEDULE
def test_whole_tensors(op_device: torch.device) -> None:
    """q, k, v as separate tensors; KV cache and block table as views of larger tensors."""
    given = arguments(CASES["MHA"].problem(), op_device)
    cache, table = given["kv_cache"], given["block_table"]
    layers = torch.full((len(cache), 3, *cache.shape[1:]), torch.nan, dtype=cache.dtype)
    layers = layers.to(op_device)
    layers[:, 1] = cache
    wide = torch.full((len(table), table.shape[1] + 5), NO_PAGE, dtype=torch.int32)
    wide = wide.to(op_device)
    wide[:, : table.shape[1]] = table
    whole = {name: given[name].contiguous() for name in ("q", "key", "value")}
    changed = whole | {"kv_cache": layers[:, 1], "block_table": wide[:, : table.shape[1]]}
    expected = stored(given)
    assert same_bits(decode_attention(**given | changed), decode_attention(**given))
    assert same_bits(layers[:, 1].contiguous(), expected)
    assert layers[:, ::2].isnan().all()


@FP8_TOO
@pytest.mark.parametrize("keys", [16, 32])
@ONE_SCHEDULE
def test_keys_out_of_the_window_do_not_matter(
    keys: int, fp8: bool, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages before the window, which vLLM frees, are never read."""
    Chosen(1, keys=keys).use(monkeypatch)
    given = arguments(case(100, 64, window=20, fp8=fp8).problem(), op_device)
    expected = decode_attention(**given | {"kv_cache": given["kv_cache"].clone()})
    given["block_table"][0, : (100 - 20) // 16] = NO_PAGE
    given["block_table"][1, : (64 - 20) // 16] = NO_PAGE
    assert same_bits(decode_attention(**given), expected)


@FP8_TOO
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, FP16), (96, BF16), (128, BF16), (192, FP16), (256, BF16)], ids=str
)
@ONE_SCHEDULE
def test_pages_of_nan_do_not_matter(
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    sinks: bool,
    fp8: bool,
    op_device: torch.device,
) -> None:
    """NaN in unused slots never reaches the result, whether or not a head's sink is −inf."""
    lengths = 100, 64, 9
    given = case(*lengths, head_dim=head_dim, dtype=dtype, window=window, sinks=sinks, fp8=fp8)
    problem = unseen(given)
    args = arguments(problem, CPU)
    args = with_pages_of_nan(args, given)
    args = {n: x.to(op_device) if isinstance(x, torch.Tensor) else x for n, x in args.items()}
    out = decode_attention(**args).cpu()
    check_values(out, problem, torch.finfo(p_dtype(given)).eps / 2)


@pytest.mark.parametrize("splits", [1, 4])
@ONE_SCHEDULE
def test_sinks_of_minus_infinity_are_none(
    splits: int, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink of −inf, as padded heads have under tensor parallelism, changes nothing."""
    Chosen(splits).use(monkeypatch)
    given = arguments(case(100, 0, 3).problem(), op_device)
    again = given | {"kv_cache": given["kv_cache"].clone()}
    sinks = torch.full(given["q"].shape[1:2], -torch.inf, device=op_device)
    out = decode_attention(**given | {"sinks": sinks})
    assert same_bits(out, decode_attention(**again))
    assert not out[1].any()


@ONE_SCHEDULE
def test_after_a_kernel_that_writes_its_queries(op_device: torch.device) -> None:
    given, then = (arguments(CASES["MHA"].problem(), op_device) for _ in range(2))
    q = decode_attention(**given)
    expected = decode_attention(**then | {"q": q.clone(), "kv_cache": then["kv_cache"].clone()})
    assert same_bits(decode_attention(**then | {"q": decode_attention(**given)}), expected)


@FP8_TOO
@pytest.mark.parametrize("keys", [16, 32])
@ONE_SCHEDULE
def test_tokens_without_a_slot_are_not_stored(
    keys: int, fp8: bool, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot of −1 stores nothing, as in vLLM's dummy runs, whose block tables are stale."""
    Chosen(1, keys=keys).use(monkeypatch)
    given = arguments(case(17, 1, 70, query_heads=8, head_dim=128, fp8=fp8).problem(), op_device)
    cache = given["kv_cache"].clone()
    expected = decode_attention(**given | {"kv_cache": cache.clone()})
    given["slot_mapping"][1:] = -1
    only_first = stored(given)
    assert same_bits(decode_attention(**given), expected)
    assert same_bits(given["kv_cache"], only_first)


@ONE_SCHEDULE
@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**33 + 5])
def test_a_window_wider_than_any_sequence(window: int, op_device: torch.device) -> None:
    given = arguments(case(100, 64, 3).problem(), op_device)
    expected = decode_attention(**given | {"kv_cache": given["kv_cache"].clone()})
    assert same_bits(decode_attention(**given | {"window": window}), expected)


@ONE_SCHEDULE
def test_no_sequence(op_device: torch.device) -> None:
    given = arguments(case(5).problem(), op_device)
    names = "q", "key", "value", "block_table", "seq_lens", "slot_mapping"
    rows = {name: given[name][:0] for name in names}
    assert decode_attention(**given | rows).shape == (0, 4, 64)


# --- the reference ------------------------------------------------------------------------------


@EVERY_CASE
def test_reference(given: Case) -> None:
    problem = given.problem()
    args = arguments(problem, CPU)
    expected_cache = stored(args)
    names = "scale", "window", "soft_cap", "sinks", "k_scale", "v_scale"
    rest = {name: args[name] for name in names}
    sequences = len(args["seq_lens"])
    expected, _ = paged_attention(
        args["q"], expected_cache, args["block_table"], args["seq_lens"],
        torch.arange(sequences + 1, dtype=torch.int32), max_query_len=1,
        max_seq_len=max(given.keys), **rest,
    )  # fmt: skip
    assert same_bits(decode_attention(**args), expected)
    assert same_bits(args["kv_cache"], expected_cache)


def test_out() -> None:
    problem = CASES["MHA"].problem()
    place = torch.full_like(problem.q, torch.nan)
    assert decode_attention(**arguments(problem, CPU), out=place) is place
    assert not place.isnan().any()


def test_labels() -> None:
    label = DECODE_KERNELS.select(CPU, "float").label
    assert label == "nvfp4_decode_attention/reference (cpu)"


def test_opcheck() -> None:
    op = torch.ops.nvfp4.decode_attention.default
    given = arguments(CASES["everything"].problem(), CPU)
    given["out"] = torch.zeros_like(given["q"]).contiguous()
    check_op(op, tuple(given[argument.name] for argument in op._schema.arguments))


def test_compiled() -> None:
    calls = []
    for n in (33, 47):
        problem = replace(case(n, 9, n, head_dim=32), query_heads=4).problem()
        given = arguments(problem, CPU, garbage=0.0)
        calls.append(((), {name: x for name, x in given.items() if isinstance(x, Tensor)}))

    def layer(**given: Tensor) -> tuple[Tensor, Tensor]:
        return decode_attention(**given, window=9), given["kv_cache"]

    check_compiled(layer, calls, graphs=1)


# --- arguments ----------------------------------------------------------------------------------

Q = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
KEY = torch.zeros(2, 2, 64, dtype=torch.bfloat16)
CACHE = torch.zeros(6, 2, 16, 128, dtype=torch.bfloat16)
FP8_CACHE, ONE = CACHE.to(torch.float8_e4m3fn), torch.tensor(1.0)
TABLE = torch.arange(6, dtype=torch.int32).view(2, 3)
GIVEN: dict[str, Any] = {
    "q": Q, "key": KEY, "value": KEY, "kv_cache": CACHE, "block_table": TABLE,
    "seq_lens": torch.tensor([5, 48], dtype=torch.int32), "slot_mapping": torch.tensor([4, 95]),
}  # fmt: skip
REFUSED = [
    ({"q": Q.float()}, "q: dtype is float32, must be bfloat16, float16"),
    ({"q": Q[0]}, r"q: shape is \(4, 64\), must be \(B, Hq, D\)"),
    ({"q": torch.zeros(2, 40, 64, dtype=Q.dtype)}, "q: has 40 heads for 2 of kv_cache, .* 16"),
    ({"key": KEY.to(FP16)}, "key: dtype is float16, must be bfloat16"),
    ({"value": KEY[:1]}, r"value: shape is \(1, 2, 64\), must be \(2, 2, 64\); a row per row"),
    ({"key": torch.zeros(2, 2, 128, dtype=Q.dtype)[..., ::2]}, "key: strides .* the last must be"),
    ({"kv_cache": CACHE.to(FP16)}, "kv_cache: dtype is float16, must be bfloat16, float8_e4m3fn"),
    ({"kv_cache": FP8_CACHE}, "k_scale: is missing, must be given with a float8_e4m3fn cache"),
    ({"kv_cache": FP8_CACHE, "k_scale": ONE}, "v_scale: is missing, must be given with"),
    ({"k_scale": ONE}, "k_scale: is given with a cache of q's dtype"),
    ({"kv_cache": FP8_CACHE, "k_scale": ONE, "v_scale": ONE.to(FP16)}, "v_scale: dtype is float16"),
    ({"kv_cache": FP8_CACHE, "k_scale": ONE.view(1), "v_scale": ONE}, r"k_scale: shape is \(1,\)"),
    ({"kv_cache": CACHE[..., :64]}, "kv_cache: its last dimension is 64, must be 128"),
    ({"kv_cache": CACHE[:, :0]}, "kv_cache: has 0 heads"),
    ({"seq_lens": TABLE[0]}, r"seq_lens: shape is \(3,\), must be \(2,\); one length per row"),
    ({"seq_lens": TABLE[0, :2].long()}, "seq_lens: dtype is int64, must be int32"),
    ({"block_table": TABLE[:1]}, r"block_table: shape is \(1, 3\), must be \(2, 3\)"),
    ({"seq_lens": torch.tensor([5, 49], dtype=torch.int32)}, "seq_lens: is 49 for row 1.* 48"),
    ({"block_table": TABLE + 1}, "block_table: holds page 6, must be from 0 to 5"),
    ({"slot_mapping": torch.tensor([4])}, r"slot_mapping: shape is \(1,\), must be \(2,\)"),
    ({"slot_mapping": TABLE[0, :2]}, "slot_mapping: dtype is int32, must be int64"),
    ({"slot_mapping": torch.tensor([4, 94])}, "slot_mapping: is 94 for row 1, must be 95, where"),
    (
        {"seq_lens": torch.tensor([0, 48], dtype=torch.int32)},
        "slot_mapping: is 4 for row 0, must be -1, where",
    ),
    ({"window": 0}, "window: is 0, must be 1 or more keys"),
    ({"soft_cap": -1.0}, "soft_cap: is -1.0, must be positive"),
    ({"scale": 0.0}, "scale: is 0.0, must be positive"),
    ({"sinks": torch.zeros(2)}, r"sinks: shape is \(2,\), must be \(4,\)"),
    ({"out": torch.zeros(2, 4, 128, dtype=Q.dtype)[..., :64]}, "out: strides .* be contiguous"),
    ({"out": Q.float()}, "out: dtype is float32, must be bfloat16"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=[m[:30] for _, m in REFUSED])
def test_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        decode_attention(**GIVEN | changed)


def shifted(x: Tensor) -> Tensor:
    """Return a copy that starts two bytes later."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return room[1:].view(x.shape).copy_(x)


@ONE_SCHEDULE
def test_what_sm90_refuses(op_device: torch.device) -> None:
    given = {n: x.to(op_device) for n, x in GIVEN.items()}
    wide = {n: x.repeat(1, 1, 3)[..., :80] for n, x in given.items() if x.ndim == 3}
    wide["kv_cache"] = given["kv_cache"].repeat(1, 1, 1, 2)[..., :160]
    odd = torch.zeros(6, 2, 24, 128, dtype=Q.dtype, device=op_device)
    nowhere = torch.full((2,), -1, device=op_device)
    for changed, message in (
        (wide, "q: D is 80, must be one of 64, 96, 128, 192, 256 on sm_90"),
        (
            {"kv_cache": odd, "slot_mapping": nowhere},
            "kv_cache: page_size is 24, must be a power of two of at least 16",
        ),
        ({"q": shifted(given["q"])}, "q: starts 2 bytes after a multiple of 16"),
        ({"value": torch.zeros(2, 2, 68, dtype=Q.dtype, device=op_device)[..., :64]}, "value: str"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            decode_attention(**given | changed)


@ONE_SCHEDULE
def test_more_sequences_than_a_grid_has_room_for(
    op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sm90 = import_module("nvfp4_kernels.attention.decode.sm90.launch")
    given = {n: x.to(op_device) for n, x in GIVEN.items()}
    monkeypatch.setattr(sm90, "MAX_BATCH", 1)
    with pytest.raises(InvalidArgument, match="q: has 2 sequences, must have at most 1 on sm_90"):
        decode_attention(**given)


# --- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "kv_heads", "most", "splits"),
    [
        (1, 8, 1 << 17, 8),
        (2, 8, 1 << 17, 4),
        (4, 8, 1 << 17, 2),
        (8, 8, 1 << 17, 2),
        (16, 8, 1 << 17, 1),
        (256, 8, 1 << 17, 1),
        (1, 1, 1 << 17, 8),
        (1, 8, 128, 1),
        (1, 8, 129, 2),
        (1, 8, 256, 2),
        (1, 8, 0, 1),
    ],
)
def test_choice(batch: int, kv_heads: int, most: int, splits: int) -> None:
    assert choose_config(batch, kv_heads, 4, 128, most).splits == splits


@pytest.mark.parametrize(
    ("batch", "kv_heads", "head_dim", "keys"),
    [(1, 2, 128, 32), (16, 8, 64, 32), (17, 8, 128, 16), (256, 8, 128, 16), (1, 2, 256, 16)],
)
def test_steps(batch: int, kv_heads: int, head_dim: int, keys: int) -> None:
    """Steps of 32 keys are chosen where an SM holds at most one CTA and has the memory."""
    assert choose_config(batch, kv_heads, 4, head_dim, 1 << 17).keys == keys
