"""Kernels compiled from a copy of their source with one replacement."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from tests import devices


def edited(text: str, right: str, wrong: str, name: str) -> str:
    """Replace ``right``, which must occur once, by ``wrong``."""
    assert text.count(right) == 1, f"{right!r} is {text.count(right)} times in {name}"
    return text.replace(right, wrong)


@contextmanager
def changed_source(
    package: str, folder: Path, module: str = "", right: str = "", wrong: str = ""
) -> Iterator[None]:
    """Context in which ``package``'s kernels come from a copy of its source with one replacement.

    ``module`` belongs to ``package`` or to ``nvfp4_kernels.sm90``, which is copied with it.
    """
    packages = [importlib.import_module(name) for name in (package, "nvfp4_kernels.sm90")]
    copies = [folder / copied.__name__ for copied in packages]
    for copied, copy in zip(packages, copies, strict=True):
        assert copied.__file__ is not None
        original = Path(copied.__file__).parent
        shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if module:
        [file] = [f for copy in copies if (f := copy / f"{module}.py").exists()]
        file.write_text(edited(file.read_text(), right, wrong, module))
    with devices.other_kernels(), pytest.MonkeyPatch.context() as patch:
        for copied, copy in zip(packages, copies, strict=True):
            # `from package import module` finds a module by the package's attribute, too.
            for name in _loaded(copied):
                patch.delattr(copied, name)
                patch.delitem(sys.modules, f"{copied.__name__}.{name}")
            patch.setattr(copied, "__path__", [str(copy)])
        importlib.invalidate_caches()
        try:
            yield
        finally:
            for copied in packages:
                for name in _loaded(copied):
                    delattr(copied, name)
                    del sys.modules[f"{copied.__name__}.{name}"]


def _loaded(package: ModuleType) -> list[str]:
    prefix = f"{package.__name__}."
    return [name.removeprefix(prefix) for name in sys.modules if name.startswith(prefix)]
