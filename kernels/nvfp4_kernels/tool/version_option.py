"""``--version``: installed versions, for bug reports."""

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

# Distributions: this package, torch, and the compiler.
_DISTRIBUTIONS = {
    "nvfp4_kernels": "vllm-fp4-plugin",
    "torch": "torch",
    "nvidia-cutlass-dsl": "nvidia-cutlass-dsl",
}


def installed_versions() -> dict[str, str]:
    """Versions of this package, torch and CuTe DSL; ``not installed`` for a missing package."""
    return {name: _version(each) for name, each in _DISTRIBUTIONS.items()}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _print_versions(wanted: bool) -> None:
    if wanted:
        for name, number in installed_versions().items():
            typer.echo(f"{name} {number}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_versions, is_eager=True, help="Print versions and exit."
    ),
]
