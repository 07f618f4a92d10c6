"""Simulation of a vLLM without its IR: modules and attributes of the IR are removed.

``python -m tests.without_ir`` then imports and registers the whole plugin.
"""

import importlib
import pkgutil
import sys
from contextlib import suppress

import vllm

from tests.vllm_names import used


def take_away() -> None:
    """Remove ``vllm.ir`` and the parts of vLLM that serve only the IR.

    Modules of vLLM that import the IR are loaded first.
    """
    from vllm.config.kernel import KernelConfig
    from vllm.platforms.interface import Platform

    for module in sorted({module for module, _ in used()}):
        importlib.import_module(module)
    for name in [name for name in sys.modules if f"{name}.".startswith("vllm.ir.")]:
        sys.modules[name] = None  # type: ignore[assignment]
    del vllm.ir, Platform.get_default_ir_op_priority
    with suppress(AttributeError):  # a default that is made for each
        del KernelConfig.ir_op_priority


def main() -> None:
    """Import and register the plugin without vLLM's IR."""
    take_away()
    import vllm_fp4_plugin

    for module in pkgutil.walk_packages(vllm_fp4_plugin.__path__, "vllm_fp4_plugin."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    vllm_fp4_plugin.register()


if __name__ == "__main__":
    main()
