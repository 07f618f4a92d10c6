"""torchvision without its compiled code: the files kept, and the wheels refused."""

import importlib.util
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / ".ci" / "repack_torchvision.py"
INFO = "torchvision-0.28.0.dist-info"
FILES = {
    "torchvision/__init__.py": "from . import extension",
    "torchvision/extension.py": "import torch\n",
    "torchvision/_C.so": "compiled",
    "torchvision/image.so": "compiled",
    "torchvision.libs/libz.b9a71669.so.1": "compiled",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\nLicense: BSD\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n",
    f"{INFO}/RECORD": "torchvision/_C.so,,\n",
}


@pytest.fixture
def repack() -> Callable[..., Path]:
    spec: Any = importlib.util.spec_from_file_location("repack_torchvision", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Path] = module.repack
    return function


def wheel(directory: Path, files: dict[str, str]) -> Path:
    path = directory / "torchvision-0.28.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_the_python_part_is_kept(repack: Callable[..., Path], tmp_path: Path) -> None:
    path = repack(wheel(tmp_path, FILES), tmp_path)
    assert path.name == "torchvision-0.28.0+python-py3-none-any.whl"
    info = "torchvision-0.28.0+python.dist-info"
    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == [
            f"{info}/METADATA",
            f"{info}/RECORD",
            f"{info}/WHEEL",
            "torchvision/__init__.py",
            "torchvision/extension.py",
        ]
        assert b"\nVersion: 0.28.0+python\n" in archive.read(f"{info}/METADATA")
        assert b"Tag: py3-none-any\n" in archive.read(f"{info}/WHEEL")
        assert b"_C" not in archive.read(f"{info}/RECORD")
        assert b'define("torchvision::nms"' in archive.read("torchvision/extension.py")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torchvision/extension.py": None}, "has no torchvision/extension.py"),
        ({f"{INFO}/METADATA": None}, f"has no {INFO}/METADATA"),
        ({f"{INFO}/METADATA": "Name: torchvision\n"}, "METADATA states no version 0.28.0"),
    ],
)
def test_another_layout_is_refused(
    changes: dict[str, Any], message: str, repack: Callable[..., Path], tmp_path: Path
) -> None:
    files = {name: content for name, content in (FILES | changes).items() if content is not None}
    with pytest.raises(ValueError, match=message):
        repack(wheel(tmp_path, files), tmp_path)


def test_it_imports_and_its_operators_cannot_be_called() -> None:
    import torchvision

    assert torchvision.transforms.functional.resize(torch.zeros(3, 4, 4), [2, 2]).shape == (3, 2, 2)
    with pytest.raises(RuntimeError, match="Couldn't load custom C"):
        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
