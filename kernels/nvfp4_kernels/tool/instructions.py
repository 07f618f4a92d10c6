"""Instruction counts of a kernel, from the listing of CUDA's ``nvdisasm``."""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

# Offset, predicate if any, and the instruction without its modifiers.
_LINE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
# Instructions in the report, and their purposes.
SHOWN = {
    "UTCOMMA": "block-scaled MMA",
    "UTCCP": "scales to tensor memory",
    "UTMALDG": "bulk tensor load",
    "UTMASTG": "bulk tensor store",
    "LDTM": "load from tensor memory",
    "LDG": "load",
    "STG": "store",
    "LDS": "shared load",
    "STS": "shared store",
    "SYNCS": "mbarrier operation",
}
LOCAL = ("LDL", "STL")  # accesses of spilled registers


class NoDisassembler(RuntimeError):
    """CUDA's ``nvdisasm`` cannot be found or used."""


def find_nvdisasm() -> Path:
    """Path of ``nvdisasm``: in PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda or a Python package.

    Raises:
        NoDisassembler: ``nvdisasm`` is not found.
    """
    candidates = [Path(found)] if (found := shutil.which("nvdisasm")) else []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append(Path(os.environ[variable], "bin", "nvdisasm"))
    candidates.append(Path("/usr/local/cuda/bin/nvdisasm"))
    for package, inside in (
        ("triton", "backends/nvidia/bin/nvdisasm"),
        ("nvidia", "cuda_nvdisasm/bin/nvdisasm"),
        ("nvidia", "cu13/bin/nvdisasm"),
    ):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            candidates.append(Path(folder, inside))
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise NoDisassembler(
        "nvdisasm: not on PATH, in CUDA_HOME or in a Python package; the instruction mix needs it: "
        "install the CUDA toolkit, triton or nvidia-cuda-nvdisasm"
    )


def disassemble(cubin: bytes, nvdisasm: Path) -> str:
    """Disassembly listing of ``cubin``.

    Raises:
        NoDisassembler: ``nvdisasm`` cannot read ``cubin``, e.g. because the program is too old.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(nvdisasm), "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoDisassembler(
            f"{nvdisasm}: {done.stderr.strip() or f'ended with {done.returncode}'}; the mix of "
            "instructions needs one that knows this GPU, of CUDA 13 or newer"
        )
    return done.stdout


def count(listing: str) -> dict[str, int]:
    """Count the occurrences of each instruction, without modifiers."""
    matches = filter(None, map(_LINE.match, listing.splitlines()))
    return dict(Counter(match[1] for match in matches).most_common())
