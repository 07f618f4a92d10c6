"""vLLM's installation: whether it exists, imports, and runs on this machine."""

import sys
from importlib.util import find_spec

from vllm_fp4_plugin.engine import platform
from vllm_fp4_plugin.versions import VLLM, vllm_names, vllm_version

_EXTRAS = (
    "the extra `cuda` of vllm-fp4-plugin on a machine with a GPU, `cpu` on one without: "
    "`pip install '.[cpu]'` in a clone"
)
# vLLM's CPU build declares packages of which the registry has builds for GPUs alone.
_OTHER_BUILD = (
    "torchvision is built for another torch, and vllm needs none: "
    "`pip uninstall -y torchvision torchaudio torchcodec`"
)


class UnusableVllm(ImportError):
    """Error for a vLLM that is not installed, cannot be imported, or does not run on this machine.

    Neither the cause nor the remedy depends on the model.
    """


def check_installed() -> None:
    """Check that vLLM is installed, without importing it.

    Raises:
        UnusableVllm: vLLM is not installed; the message names the extras that install it.
    """
    try:
        found = find_spec("vllm")
    except (ImportError, ValueError):  # an entry of the environment that breaks imports
        found = None
    if found is None:
        raise UnusableVllm(
            f"vllm: is not installed for {sys.executable}, must be version {VLLM}; install "
            f"{_EXTRAS}"
        )


def check(*, to_plan: bool = False) -> None:
    """Check that vLLM is installed, imports, and finds a device to run on.

    Args:
        to_plan: whether models are only built and never run, for which vLLM's GPU build needs no
            GPU.

    Raises:
        UnusableVllm: the message names the fault and the remedy.
        IncompatibleVllm: this vLLM lacks a name that the plugin uses.
    """
    check_installed()
    _import("vllm.platforms")
    if to_plan:
        platform.plan_without_device()
    with vllm_names():
        from vllm.platforms import current_platform
    # Without a platform most imports of vLLM fail, each with another error.
    if not current_platform.device_type:
        raise UnusableVllm(platform.no_device())
    _import("vllm.engine.arg_utils")


def check_planned_arch(arch: str) -> None:
    """Check that the user named an architecture to plan for, if this machine has no device.

    ``arch``: value of ``--arch``; empty if not given.

    Raises:
        UnusableVllm: no architecture is named.
    """
    if not arch and platform.is_without_device():
        raise UnusableVllm(
            f"arch: is not given, and vllm {vllm_version()} finds no device here to plan for, must "
            "be one to plan for; give --arch sm_90 or --arch sm_100"
        )


def _import(module: str) -> None:
    """Import a module of vLLM; convert any error to ``UnusableVllm``."""
    try:
        __import__(module)
    except Exception as error:
        remedy = _OTHER_BUILD if "torchvision::" in str(error) else f"install anew {_EXTRAS}"
        raise UnusableVllm(
            f"vllm: version {vllm_version()} cannot be imported ({type(error).__name__}: {error}), "
            f"must be {VLLM} with the dependencies of its build; {remedy}"
        ) from error


if __name__ == "__main__":
    try:
        check()
    except ImportError as unusable:
        sys.exit(str(unusable))
