"""Tensor-core, copy, barrier, fence and launch instructions that our kernels use.

``python -m tests.test_kernels.chains.opcodes`` compiles every kernel that ``build`` compiles for a
Llama 8B, runs each op of the chains and the indexer in each of its formats, and lists the opcodes.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nvfp4_kernels.precompile.attention_sm90 import decode_kernels
from nvfp4_kernels.precompile.attention_sm100 import attention_kernels
from nvfp4_kernels.precompile.linear_sm90 import weight_only_kernels
from nvfp4_kernels.precompile.linear_sm100 import block_scaled_kernels
from nvfp4_kernels.precompile.model import Attention, Layer, Model
from nvfp4_kernels.precompile.norm_rotary_sm90 import norm_rotary_kernels
from nvfp4_kernels.precompile.rotary_store import rotary_store_kernels
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.tool.shapes import LLAMA_8B
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.chains import stages_sm90, stages_sm100
from tests.test_kernels.chains.stage import loading
from tests.test_kernels.indexer.indexer_cases import Case, run_logits
from tests.test_kernels.indexer.indexer_oracle import FORMATS

TABLE = Path(__file__).parents[2] / "emulator" / "INSTRUCTIONS.md"
STAGES = {"sm_90": stages_sm90, "sm_100": stages_sm100}
MAX_TOKENS = 2048  # larger counts need no further kind of kernel
ATTENTION = Attention(query_heads=32, kv_heads=8, head_dim=128)
HIDDEN = 4096
# Llama 8B has too many rows for a one-CTA tile with tokens on the M side.
NARROW_MLP = Model("narrow", LLAMA_8B.dtype, (Layer("gate_up_proj", 4096, 7168, gate_up=True),))
_FAMILIES = r"tcgen05|cp\.async|mbarrier|fence|prefetch\.tensormap|clusterlaunchcontrol"
_OPCODE = re.compile(rf"^\s*(?:@!?%?\w+\s+)?((?:{_FAMILIES})[\w.:]*)", re.MULTILINE)


def opcodes(text: str) -> set[str]:
    """Opcodes in a PTX text, with all modifiers except the number of registers, ``.xN``."""
    return {re.sub(r"\.x\d+", ".xN", found) for found in _OPCODE.findall(text)}


def model_kernels(arch: str) -> list[KernelSpec]:
    """Kernels that ``build`` compiles for a Llama 8B, and for a smaller MLP on Blackwell."""
    if arch == "sm_90":
        found = weight_only_kernels(LLAMA_8B, max_tokens=MAX_TOKENS)
        found |= decode_kernels(ATTENTION, LLAMA_8B.dtype)
        found |= norm_rotary_kernels(HIDDEN, ATTENTION, LLAMA_8B.dtype)
    else:
        found = block_scaled_kernels(LLAMA_8B, max_tokens=MAX_TOKENS)
        found |= block_scaled_kernels(NARROW_MLP, max_tokens=128)
        found |= attention_kernels(ATTENTION, LLAMA_8B.dtype)
        found |= rotary_store_kernels(ATTENTION, LLAMA_8B.dtype, max_tokens=MAX_TOKENS)
    return list(found)


def kinds(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """One kernel of each kind: a kind ignores numbers above 2 and the row scale."""
    found: dict[str, KernelSpec] = {}
    for spec in specs:
        kind = re.sub(r"=([3-9]|\d\d+)\b", "=n", f"{spec.op} {spec.fields}")
        found.setdefault(re.sub(r"row_scale=\w+", "", kind), spec)
    return list(found.values())


def compiled(arch: str, specs: Iterable[KernelSpec]) -> Iterator[tuple[str, str]]:
    """Yield the op's name and the PTX of each kernel."""
    texts: list[str] = []
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(devices, "source_lines", False)  # saves a quarter of the time
        patch.setattr(devices, "binaries", "plain")  # ptxas must accept a model's kernels
        stack.enter_context(devices.emulated(EAGER, arch))
        from nvfp4_kernels.runtime.compile import compile_kernel
        from tests.emulator.runtime import embedding

        given = embedding.with_ptx
        patch.setattr(
            embedding, "with_ptx", lambda image, ptx: (texts.append(ptx), given(image, ptx))[1]
        )
        for spec in specs:
            compile_kernel(spec.kernel())
            yield spec.op, texts[-1]


def launched(arch: str) -> Iterator[tuple[str, str]]:
    """Yield the stage's name and the PTX of every op's kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "source_lines", False)
        yield from _launched(arch)


def _launched(arch: str) -> Iterator[tuple[str, str]]:
    for stage in STAGES[arch].STAGES:
        with devices.emulated_ops(EAGER, arch) as gpu, loading(gpu, {}) as loaded:
            stage.run(STAGES[arch].GIVEN[stage.takes]())
        yield from ((stage.name, text) for text in loaded)
    for fmt in FORMATS if arch == "sm_100" else ():
        with devices.emulated_ops(EAGER, arch) as gpu, loading(gpu, {}) as loaded:
            run_logits(**Case(((20,), (20,)), heads=4).problem(fmt).contiguous())
        yield from ((f"indexer_logits, {fmt}", text) for text in loaded)


def used(arch: str, specs: Iterable[KernelSpec]) -> dict[str, set[str]]:
    """Opcodes of ``specs`` and of every op, with the names of the ops that use them."""
    found: dict[str, set[str]] = defaultdict(set)
    for texts in (compiled(arch, specs), launched(arch)):
        for name, text in texts:
            for opcode in opcodes(text):
                found[opcode].add(name)
    return found


def main() -> None:
    """Print every opcode and its users."""
    found: dict[str, set[str]] = defaultdict(set)
    for arch in STAGES:
        for opcode, names in used(arch, model_kernels(arch)).items():
            found[opcode] |= {f"{arch} {name}" for name in names}
    for opcode, names in sorted(found.items()):
        print(f"{opcode}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
