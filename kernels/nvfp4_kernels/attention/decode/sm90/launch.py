"""Launch of decode attention on sm_90."""

from torch import Tensor

from nvfp4_kernels.attention.decode.call import DecodeCall
from nvfp4_kernels.attention.decode.sm90.choose import choose_config
from nvfp4_kernels.attention.decode.sm90.kernel import DecodeArguments, DecodeAttentionSm90
from nvfp4_kernels.attention.decode.sm90.loader import CacheScales, Strides
from nvfp4_kernels.attention.decode.sm90.mainloop import LogitScaling
from nvfp4_kernels.attention.decode.sm90.merge import DecodeResult
from nvfp4_kernels.attention.decode.sm90.tile import HEAD_DIMS, KEYS, Variant
from nvfp4_kernels.attention.decode.sm90.token import TokenTensor
from nvfp4_kernels.checks import InvalidArgument, check_rows, strides_of
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.runtime.compile import launch

MAX_BATCH = 65535  # CTAs along a grid's z dimension


def decode_attention(call: DecodeCall) -> None:
    """See ``nvfp4_kernels.attention.decode.op.decode_attention``.

    Raises:
        InvalidArgument: an unsupported D or page size, too many sequences, or rows that are
            misaligned.
    """
    out, q, key, value, kv_cache, block_table, seq_lens, slot_mapping, sinks, *_ = call
    fp8 = call.k_scale is not None
    scoring = call.scoring
    batch, num_heads, head_dim = q.shape
    pages, kv_heads, page_size, _ = kv_cache.shape
    _, arch, sms = device_facts(q.device)
    if head_dim not in HEAD_DIMS:
        raise InvalidArgument(
            f"q: D is {head_dim}, must be one of {', '.join(map(str, HEAD_DIMS))} on {arch}; pad "
            "q, key, value and the cache with zeros and pass scale"
        )
    if page_size < KEYS or page_size & (page_size - 1):
        raise InvalidArgument(
            f"kv_cache: page_size is {page_size}, must be a power of two of at least {KEYS} on "
            f"{arch}; set vLLM's block size to 16, 32, 64 or 128"
        )
    if batch > MAX_BATCH:
        raise InvalidArgument(
            f"q: has {batch} sequences, must have at most {MAX_BATCH} on {arch}; split the batch"
        )
    check_rows(arch, q=q, key=key, value=value, kv_cache=kv_cache, out=out)
    if batch == 0:
        return
    max_keys = block_table.shape[1] * page_size
    if scoring.window is not None:
        max_keys = min(max_keys, scoring.window)
    group = num_heads // kv_heads
    tile = choose_config(batch, kv_heads, group, head_dim, max_keys, sms, fp8=fp8)
    variant = Variant(
        dtype=dtype_name(q.dtype),  # type: ignore[arg-type]
        page_size=page_size,
        window=scoring.window is not None,
        soft_cap=scoring.soft_cap is not None,
        sinks=sinks is not None,
    )
    page, head, row, _ = strides_of(kv_cache)
    arguments = DecodeArguments(
        q=_token_tensor(q),
        key=_token_tensor(key),
        value=_token_tensor(value),
        kv_cache=kv_cache,
        cache_strides=Strides(row=row, head=head, page=page),
        cache_scales=CacheScales(call.k_scale, call.v_scale),
        block_table=block_table,
        table_stride=strides_of(block_table)[0],
        seq_lens=seq_lens,
        slot_mapping=slot_mapping,
        result=DecodeResult(out, sinks),
        logits=LogitScaling(scoring.scale, scoring.soft_cap or 0.0),
        window=scoring.window_keys,
        batch=batch,
        kv_heads=kv_heads,
        pages=pages,
    )
    launch(DecodeAttentionSm90(tile, variant), arguments)


def _token_tensor(x: Tensor) -> TokenTensor:
    token, head, _ = strides_of(x)
    return TokenTensor(x, token_stride=token, head_stride=head)
