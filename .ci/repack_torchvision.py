"""Repack torchvision without its compiled code, which needs CUDA and a torch built for it.

vLLM's and transformers' image processors use its transforms, which are Python over torch. The
compiled operators cannot be called: they are declared, so that the package imports, but have no
kernels.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

LOCAL = "python"  # a version of its own, or pip would keep what it finds installed as the same one
COMPILED = re.compile(r"torchvision\.libs/|.*\.(so|pyd|dll|dylib)$")
EXTENSION = "torchvision/extension.py"  # the first module that the package imports
WHEEL = "Wheel-Version: 1.0\nGenerator: repack\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

# Operators for which the package registers shapes by name; the C++ library would declare them.
DECLARATIONS = """

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
torch.library.define("torchvision::nms", _NMS)
torch.library.define("torchvision::qnms", _NMS)
"""


def repack(wheel: Path, directory: Path) -> Path:
    """Write the Python part of torchvision's ``wheel`` as a wheel for any platform.

    Args:
        wheel: the wheel as published.
        directory: folder for the new wheel.

    Raises:
        ValueError: the wheel's layout is unknown.
    """
    name, version = wheel.name.split("-")[:2]
    old, new = f"{name}-{version}.dist-info", f"{name}-{version}+{LOCAL}.dist-info"
    files: dict[str, bytes] = {}
    with zipfile.ZipFile(wheel) as archive:
        for file in archive.namelist():
            if not COMPILED.match(file) and not file.endswith("/"):
                files[file.replace(old, new, 1)] = archive.read(file)
    for needed in (EXTENSION, f"{new}/METADATA"):
        if needed not in files:
            raise ValueError(f"{wheel.name}: has no {needed.replace(new, old)}")
    files[EXTENSION] += DECLARATIONS.encode()
    metadata = files[f"{new}/METADATA"].decode()
    stated, told = f"\nVersion: {version}\n", f"\nVersion: {version}+{LOCAL}\n"
    if stated not in metadata:
        raise ValueError(f"{wheel.name}: its METADATA states no version {version}")
    files[f"{new}/METADATA"] = metadata.replace(stated, told, 1).encode()
    files[f"{new}/WHEEL"] = WHEEL.encode()
    files[f"{new}/RECORD"] = "".join(f"{file},,\n" for file in sorted(files)).encode()
    repacked = directory / f"{name}-{version}+{LOCAL}-py3-none-any.whl"
    with zipfile.ZipFile(repacked, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return repacked
