"""Recorded outputs on disk: one compressed file for each family, one JSON about the recording."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.test_emulator.silicon.case import Array, Case

DIRECTORY = Path(__file__).parent / "vectors"


@dataclass(frozen=True)
class Recorded:
    """What the GPU did with a case.

    Attributes:
        digest: of the case as it was recorded.
        outputs: contents by name.
        descriptors: the driver's words of each tensor map, addresses relative to their array.
        error: name of the driver's error, where the launch failed instead.
    """

    digest: str
    outputs: dict[str, Array]
    descriptors: dict[str, Array]
    error: str = ""


def _planes(array: Array) -> Array:
    """Bytes of equal significance side by side, which compresses better."""
    flat = np.ascontiguousarray(array).view("u1").reshape(-1, array.dtype.itemsize)
    return np.ascontiguousarray(flat.T)


def save(directory: Path, family: str, results: dict[str, Recorded]) -> None:
    """Write ``<family>.npz``: all outputs one after another, and an index of where each lies."""
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
    """The recorded cases of a family by name."""
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
    """The recording of a case.

    Raises:
        LookupError: there is none, or the case has changed since.
    """
    if case.name not in results or results[case.name].digest != case.digest():
        raise LookupError(
            f"{case.name} is not as recorded: run python -m tests.test_emulator.silicon.record "
            "on a GPU of compute capability 9.0"
        )
    return results[case.name]
