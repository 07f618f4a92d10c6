"""Kernels that an engine's warmup would compile, and kernels that the engine then launches."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.runtime import compile as compiler
from nvfp4_kernels.runtime.compile import DeviceKernel
from vllm_fp4_plugin import warmup
from vllm_fp4_plugin.fusion.self_check import run as self_check


@dataclass
class Kernels:
    """Kernels of all engines in this process.

    Attributes:
        warmup: kernels compiled before requests arrive, by owner.
        launched: kernels that the engines ran.
    """

    warmup: dict[str, set[DeviceKernel]] = field(default_factory=dict)
    launched: set[DeviceKernel] = field(default_factory=set)


@contextmanager
def recorded() -> Iterator[Kernels]:
    """Context in which engines on CPU warm up as on a GPU, but compile nothing.

    The self-check at start is skipped, as it launches unfused kernels too.
    """
    found, compiled = Kernels(), compiler.compiled

    def note(specs: Iterable[KernelSpec], whose: str) -> str:
        found.warmup.setdefault(whose, set()).update(spec.kernel() for spec in specs)
        return ""

    def launch(kernel: DeviceKernel, target: str) -> Any:
        found.launched.add(kernel)
        return compiled(kernel, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "is_wanted", lambda _: True)
        patch.setattr(self_check, "check", lambda *_: None)
        patch.setattr(warmup, "compile_kernels", note)
        patch.setattr(compiler, "compiled", launch)
        yield found
