"""Digest of the sources of plugin and kernels, as a cache key."""

import hashlib
from functools import cache
from pathlib import Path

import nvfp4_kernels

PACKAGES = (Path(__file__).parent, Path(nvfp4_kernels.__file__).parent)


@cache
def digest() -> str:
    """Digest of all sources, which distinguishes builds with the same version number."""
    found = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted(package.rglob("*.py")):
            found.update(f"{package.name}/{file.relative_to(package).as_posix()}\0".encode())
            found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:32]
