"""Batch invariance, which nothing of ours gives: it is refused before anything is loaded.

Kernels choose tiles, and how they split K and keys, by the number of tokens and sequences; each
split adds up in another order. So does torch in the CPU's references.
"""

from vllm import envs

from vllm_fp4_plugin.options import METHOD


class BatchInvarianceRefused(ValueError):
    """``VLLM_BATCH_INVARIANT`` is set."""


def refuse() -> None:
    """Refuse to serve a model whose answers may not depend on the batch.

    Raises:
        BatchInvarianceRefused: it was asked for.
    """
    if envs.VLLM_BATCH_INVARIANT:
        raise BatchInvarianceRefused(
            f"VLLM_BATCH_INVARIANT: is set, must not be with {METHOD}, whose kernels add up in an "
            "order that depends on the number of tokens; unset it, or serve a 16-bit checkpoint "
            "without quantization"
        )
