"""A vLLM without its IR, as far as one with it can stand in: what only knows it is gone.

``python -m tests.without_ir`` imports all of the plugin there, and registers it.
"""

import importlib
import pkgutil
import sys
from contextlib import suppress

import vllm

from tests.vllm_names import used


def take_away() -> None:
    """Remove ``vllm.ir``, and what else of vLLM is there for it alone.

    Modules of vLLM that are built on it have to be there already.
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
    """Import and register the plugin without it."""
    take_away()
    import vllm_fp4_plugin

    for module in pkgutil.walk_packages(vllm_fp4_plugin.__path__, "vllm_fp4_plugin."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    vllm_fp4_plugin.register()


if __name__ == "__main__":
    main()
