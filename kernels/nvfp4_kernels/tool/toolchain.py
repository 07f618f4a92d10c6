"""Check that the packages needed to compile kernels are installed."""

from importlib.util import find_spec

_PACKAGES = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}


class NoCompiler(RuntimeError):
    """Missing package that is needed to compile kernels."""


def check_compiler() -> None:
    """Raise if kernels cannot be compiled.

    Raises:
        NoCompiler: a package is missing; the message names the packages to install.
    """
    # Importing CuTe DSL would bind this process to a runtime.
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise NoCompiler(
            f"compiling kernels needs {' and '.join(missing)}, not installed; "
            'pip install "vllm-fp4-plugin[kernels]"'
        )
