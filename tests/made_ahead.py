"""Which kernels an engine would compile before it serves, and which it launches."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from nvfp4_kernels import compile as compiler
from nvfp4_kernels.compile import DeviceKernel
from nvfp4_kernels.precompile.spec import KernelSpec
from vllm_fp4_plugin import ahead


@dataclass
class Kernels:
    """Of the engines of this process.

    Attributes:
        ahead: compiled before requests come, by whose they are.
        launched: whatever they ran.
    """

    ahead: dict[str, set[DeviceKernel]] = field(default_factory=dict)
    launched: set[DeviceKernel] = field(default_factory=set)


@contextmanager
def gathered(sms: int) -> Iterator[Kernels]:
    """Within, engines on CPU take it for a GPU of ``sms`` multiprocessors, but compile nothing."""
    found, compiled = Kernels(), compiler.compiled

    def note(specs: Iterable[KernelSpec], whose: str) -> str:
        found.ahead.setdefault(whose, set()).update(spec.kernel() for spec in specs)
        return ""

    def launch(kernel: DeviceKernel, target: str) -> Any:
        found.launched.add(kernel)
        return compiled(kernel, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "is_wanted", lambda _: True)
        patch.setattr(ahead, "multiprocessors", lambda _: sms)
        patch.setattr(ahead, "compile_kernels", note)
        patch.setattr(compiler, "compiled", launch)
        yield found
