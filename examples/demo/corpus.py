"""Real text found on any Python machine: the standard library's own sources and documentation.

A hash of its path puts a file into the training or the held-out part, so that it never changes
sides. Identical files count once.
"""

import ast
import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "__pycache__",
}
# Tables written by programs: they teach nothing and would fill the vocabulary with numbers.
SKIPPED_FILES = {"stringprep.py", "html/entities.py", "re/_casefix.py"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "lib2to3/pgen2")
HELD_OUT_ONE_IN = 14
MIN_CHARACTERS = 200
CALIBRATION_FILES = 64
CALIBRATION_CHARACTERS = 4000  # of each file


@dataclass(frozen=True)
class Document:
    """One source file: ``path`` relative to the library's root, in POSIX form, and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents sorted by path; no text is in both parts."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over every path, text and side."""
        digest = hashlib.sha256()
        for side, documents in (("train", self.train), ("held_out", self.held_out)):
            for document in documents:
                digest.update(
                    f"{side}\0{document.path}\0{len(document.text)}\0{document.text}".encode()
                )
        return digest.hexdigest()


def read_corpus(root: Path | None = None) -> Corpus:
    """Read and split every usable ``.py`` file under ``root``, by default the standard library.

    Raises:
        ValueError: if either side would be empty.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    documents = drop_duplicates(_read_documents(root))
    train = tuple(d for d in documents if not is_held_out(d.path))
    held_out = tuple(d for d in documents if is_held_out(d.path))
    if not train or not held_out:
        raise ValueError(
            f"root: {root} gives {len(train)} training and {len(held_out)} held-out files, "
            "each must be at least 1; point it at a folder of Python sources"
        )
    return Corpus(train, held_out)


def is_held_out(path: str) -> bool:
    """Side of a file, from its relative POSIX path alone."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) % HELD_OUT_ONE_IN == 0


def drop_duplicates(documents: Iterable[Document]) -> list[Document]:
    """Sort by path and keep the first document of each text."""
    unique: dict[str, Document] = {}
    for document in sorted(documents, key=lambda d: d.path):
        unique.setdefault(document.text, document)
    return list(unique.values())


def calibration_text(corpus: Corpus) -> str:
    """The beginnings of some training files, spread over all of them."""
    spread = corpus.train[:: max(1, len(corpus.train) // CALIBRATION_FILES)]
    return "\n\n".join(document.text[:CALIBRATION_CHARACTERS] for document in spread)


def _read_documents(root: Path) -> Iterable[Document]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        for name in files:
            path = (Path(folder) / name).relative_to(root).as_posix()
            if (
                not name.endswith(".py")
                or path in SKIPPED_FILES
                or path.startswith(SKIPPED_PREFIXES)
            ):
                continue
            text = (root / path).read_text(encoding="utf-8", errors="replace")
            if path == "pydoc_data/topics.py":
                text = _topics_prose(text)
            if len(text) >= MIN_CHARACTERS:
                yield Document(path, text)


def _topics_prose(source: str) -> str:
    """The language reference kept in ``pydoc_data/topics.py``, as the prose ``help()`` shows."""
    assignment = next(node for node in ast.parse(source).body if isinstance(node, ast.Assign))
    topics: dict[str, str] = ast.literal_eval(assignment.value)
    return "\n\n".join(topics[name] for name in sorted(topics))
