"""Cache of pipeline stages: a folder each, complete or absent, keyed by inputs and code."""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STAGE_FILE = "stage.json"
_PIECE_BYTES = 1 << 24  # a checkpoint may be larger than memory


@dataclass(frozen=True)
class Stage:
    """A finished stage.

    Attributes:
        name: name of the stage.
        folder: folder of the stage's files.
        content: SHA-256 of the files; later stages include it in their inputs.
        seconds: time to make the stage, or to find it again.
        reused: whether the stage was found in the cache.
    """

    name: str
    folder: Path
    content: str
    seconds: float
    reused: bool


@dataclass
class StageCache:
    """Stages under ``root``, one folder ``<name>-<key>`` each.

    Attributes:
        root: cache folder, made when missing.
        fresh: whether to make every stage again, replacing cached stages.
        finished: the stages of this run, in order.
    """

    root: Path
    fresh: bool = False
    finished: list[Stage] = field(default_factory=list)

    def stage(
        self,
        name: str,
        inputs: Mapping[str, Any],
        code: Iterable[Path],
        make: Callable[[Path], None],
    ) -> Stage:
        """Find a stage made from the same inputs by the same code, or make a new stage.

        Args:
            name: name of the stage, safe in file names.
            inputs: everything the result depends on, as JSON values.
            code: files and packages that make the stage; any change in the code makes the stage
                anew.
            make: function that fills the given empty folder. If it raises, the folder is removed.
        """
        start = time.monotonic()
        key = hashlib.sha256(
            json.dumps([dict(inputs), hash_files(code)], sort_keys=True).encode()
        ).hexdigest()[:16]
        folder = self.root / f"{name}-{key}"
        reused = not self.fresh and (folder / STAGE_FILE).is_file()
        if not reused:
            self._make(name, dict(inputs), folder, make)
        content = json.loads((folder / STAGE_FILE).read_text())["content"]
        stage = Stage(name, folder, content, time.monotonic() - start, reused)
        self.finished.append(stage)
        return stage

    def _make(
        self, name: str, inputs: dict[str, Any], folder: Path, make: Callable[[Path], None]
    ) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        # A folder beside the final folder: a rename is atomic within one file system only.
        with tempfile.TemporaryDirectory(
            dir=self.root, prefix=f".{name}-", ignore_cleanup_errors=True
        ) as workspace:
            partial = Path(workspace) / "made"
            partial.mkdir()
            make(partial)
            record = {"name": name, "inputs": inputs, "content": hash_files([partial])}
            (partial / STAGE_FILE).write_text(json.dumps(record, indent=2) + "\n")
            if folder.exists():
                folder.rename(Path(workspace) / "replaced")
            partial.rename(folder)


def hash_files(paths: Iterable[Path]) -> str:
    """SHA-256 over names and bytes of files; a folder stands for its files, except bytecode."""
    digest = hashlib.sha256()
    for path in paths:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in files:
            if file.suffix == ".pyc":
                continue
            name = file.name if file is path else file.relative_to(path).as_posix()
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while piece := stream.read(_PIECE_BYTES):
                    digest.update(piece)
    return digest.hexdigest()


def plugin_sources() -> list[Path]:
    """Source folders of the plugin and its kernels, found without an import."""
    specs = [find_spec(name) for name in ("vllm_fp4_plugin", "nvfp4_kernels")]
    return [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin]
