"""Record the results of every case on a GPU of compute capability 9.0.

    python -m tests.test_emulator.silicon.record --out tests/test_emulator/silicon/vectors

A case that fails ends its process, as the context is lost; a new process continues, and the
error's name is recorded in place of outputs.
"""

import argparse
import json
import multiprocessing
import platform
import sys
from collections.abc import Iterator
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from tests.test_emulator.silicon.cases import FAMILIES, descriptors, family
from tests.test_emulator.silicon.driver import DriverError, Gpu
from tests.test_emulator.silicon.vectors import Recorded, save

_PATIENCE = 15.0  # seconds for one launch, before it counts as hanging


def _work(families: tuple[str, ...], skip: set[tuple[str, str]], pipe: Connection) -> None:
    """Run the cases that are not in ``skip``, and send each result; stop at the first failure."""
    with Gpu() as gpu:
        pipe.send((gpu.name(), gpu.version()))
        for name in families:
            for case in family(name):
                if (name, case.name) in skip:
                    continue
                pipe.send((name, case.name))
                try:
                    outputs, words = gpu.launch(case)
                except DriverError as error:
                    pipe.send(Recorded(case.digest(), {}, {}, str(error)))
                    return
                kept = {key: array for key, array in outputs.items() if key != "scratch"}
                pipe.send(Recorded(case.digest(), kept, words))
        pipe.send(None)


def _record(families: tuple[str, ...]) -> Iterator[tuple[str, str, Recorded] | tuple[str, str]]:
    """Yield device name and driver version, then (family, case, result), across processes."""
    context = multiprocessing.get_context("spawn")
    done: set[tuple[str, str]] = set()
    finished = False
    while not finished:
        pipe, other = context.Pipe()
        process = context.Process(target=_work, args=(families, done, other))
        process.start()
        other.close()
        device = pipe.recv()
        if not done:
            yield device
        key: tuple[str, str] | None = None
        try:
            while True:
                if not pipe.poll(_PATIENCE):
                    raise TimeoutError
                message = pipe.recv()
                if message is None:
                    finished = True
                    break
                if isinstance(message, tuple):
                    key = message
                    continue
                assert key is not None
                done.add(key)
                yield (*key, message)
                key = None
        except (EOFError, TimeoutError) as error:
            if key is not None:
                done.add(key)
                yield (*key, Recorded("", {}, {}, type(error).__name__))
        process.kill()
        process.join()


def _record_descriptors(directory: Path) -> None:
    """Write ``descriptors.npz``: the driver's answer and words for each set of arguments."""
    results = {}
    with Gpu() as gpu:
        for name, tensor_map in descriptors.maps():
            try:
                words = gpu.encode(tensor_map, descriptors.ADDRESS + tensor_map.offset)
                results[name] = Recorded(repr(tensor_map), {"words": words}, {})
            except DriverError as error:
                results[name] = Recorded(repr(tensor_map), {}, {}, str(error))
    save(directory, "descriptors", results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the recordings")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    options = parser.parse_args()
    messages = _record(tuple(options.families))
    device, version = next(messages)[:2]
    results: dict[str, dict[str, Recorded]] = {name: {} for name in options.families}
    for message in messages:
        name, case, result = message  # type: ignore[misc]
        results[name][case] = result
        if result.error:
            print(f"{name} {case}: {result.error}", flush=True)
    for name, recorded in results.items():
        save(options.out, name, recorded)
        print(
            f"{name}: {len(recorded)} cases, {(options.out / f'{name}.npz').stat().st_size} bytes"
        )
    _record_descriptors(options.out)
    about = {
        "device": device,
        "cuda": version,
        "driver": _driver(),
        "date": date.today().isoformat(),
        "command": "python -m tests.test_emulator.silicon.record --out <directory>",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cases": {name: len(recorded) for name, recorded in results.items()},
    }
    (options.out / "recording.json").write_text(json.dumps(about, indent=2) + "\n")
    return 0


def _driver() -> str:
    """Version of NVIDIA's kernel-mode driver, if the system reports it."""
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return "unknown"
    words = path.read_text().split("\n")[0].split()
    return next((word for word in words if word.count(".") >= 2), "unknown")


if __name__ == "__main__":
    sys.exit(main())
