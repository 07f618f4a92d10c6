"""Recorded outputs on disk: a compressed file per family, and JSON about the recording."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.test_emulator.silicon.case import Array, Case

DIRECTORY = Path(__file__).parent / "vectors"


@dataclass(frozen=True)
class Recorded:
    """Results of one case, recorded on a GPU.

    Attributes:
        digest: digest of the recorded case.
        outputs: contents by name.
        descriptors: the driver's words of each tensor map, addresses relative to the arrays.
        error: name of the driver's error, if the launch failed.
    """

    digest: str
    outputs: dict[str, Array]
    descriptors: dict[str, Array]
    error: str = ""


def _planes(array: Array) -> Array:
    """Bytes grouped by significance, which compresses better."""
    flat = np.ascontiguousarray(array).view("u1").reshape(-1, array.dtype.itemsize)
    return np.ascontiguousarray(flat.T)


def save(directory: Path, family: str, results: dict[str, Recorded]) -> None:
    """Write ``<family>.npz``: all outputs in sequence, and an index of their positions."""
    directory.mkdir(parents=True, exist_ok=True)
    parts: list[Array] = []
    index: dict[str, Any] = {}
    for name, result in results.items():
        entry: dict[str, Any] = {"digest": result.digest, "error": result.error}
        for kind in ("outputs", "descriptors"):
            entry[kind] = {}
            for key, array in getattr(result, kind).items():
                entry[kind][key] = [array.dtype.str, list(array.shape)]
                parts.append(_planes(array).reshape(-1))
        index[name] = entry
    data = np.concatenate(parts) if parts else np.zeros(0, "u1")
    text = np.frombuffer(json.dumps(index).encode(), "u1")
    np.savez_compressed(directory / f"{family}.npz", index=text, data=data)


def read(family: str, directory: Path = DIRECTORY) -> dict[str, Recorded]:
    """Recorded cases of a family, by name."""
    with np.load(directory / f"{family}.npz") as file:
        index, data = json.loads(file["index"].tobytes()), file["data"]
    place = 0
    results = {}
    for name, entry in index.items():
        kinds: dict[str, dict[str, Array]] = {"outputs": {}, "descriptors": {}}
        for kind, arrays in kinds.items():
            for key, (dtype, shape) in entry[kind].items():
                size = np.dtype(dtype).itemsize * int(np.prod(shape))
                planes = data[place : place + size].reshape(np.dtype(dtype).itemsize, -1)
                arrays[key] = np.ascontiguousarray(planes.T).view(dtype).reshape(shape)
                place += size
        results[name] = Recorded(
            entry["digest"], kinds["outputs"], kinds["descriptors"], entry["error"]
        )
    return results


def recorded(case: Case, results: dict[str, Recorded]) -> Recorded:
    """Recording of a case.

    Raises:
        LookupError: the case has no recording, or has changed since.
    """
    if case.name not in results or results[case.name].digest != case.digest():
        raise LookupError(
            f"{case.name} is not as recorded: run python -m tests.test_emulator.silicon.record "
            "on a GPU of compute capability 9.0"
        )
    return results[case.name]
