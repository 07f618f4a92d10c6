"""Real text found on any Python machine: the sources and documentation of its packages.

The hash of a file's path alone decides whether the file is in the training or the held-out part.
Identical files count once.
"""

import ast
import hashlib
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))

SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "_vendor",
    "__pycache__",
}
# Tables and generated files: they teach little and would fill the vocabulary with numbers.
SKIPPED_FILES = {"stringprep.py", "html/entities.py", "re/_casefix.py"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "lib2to3/pgen2")
GENERATED = re.compile(
    r"auto-?generated|automatically generated|@generated|file generated|do not (edit|modify)", re.I
)
NOTICE_CHARACTERS = 1000  # leading characters searched for a generated-file notice
MOST_DIGITS = 0.15  # share of the characters
LEAST_COMPRESSED = 0.12  # compressed share of a long file: a more repetitive file is a table
LONG_CHARACTERS = 20_000
HELD_OUT_ONE_IN = 14
MIN_CHARACTERS = 200
CALIBRATION_FILES = 64
CALIBRATION_CHARACTERS = 4000  # per file


@dataclass(frozen=True)
class Document:
    """One source file: path relative to its root, in POSIX form, and text."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Training and held-out documents, sorted by path; the two sets share no text."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over every document's path, text and split (train or held out)."""
        digest = hashlib.sha256()
        for side, documents in (("train", self.train), ("held_out", self.held_out)):
            for document in documents:
                digest.update(
                    f"{side}\0{document.path}\0{len(document.text)}\0{document.text}".encode()
                )
        return digest.hexdigest()


def read_corpus(
    roots: Sequence[Path] = (STANDARD_LIBRARY,), max_characters: int | None = None
) -> Corpus:
    """Read and split every usable ``.py`` file under ``roots``.

    Args:
        roots: folders of sources; ``tests``, ``site-packages`` and the like below them are skipped.
        max_characters: limit on the total length of the texts; ``bounded`` selects the files.

    Raises:
        ValueError: a root is not a folder, or there are no training or no held-out files.
    """
    for root in roots:
        if not root.is_dir():
            raise ValueError(f"root: {root} is not a folder; point it at Python sources")
    documents = drop_duplicates(d for root in roots for d in _read_documents(root))
    if max_characters is not None:
        documents = bounded(documents, max_characters)
    train = tuple(d for d in documents if not is_held_out(d.path))
    held_out = tuple(d for d in documents if is_held_out(d.path))
    if not train or not held_out:
        raise ValueError(
            f"root: {', '.join(map(str, roots))} gives {len(train)} training and {len(held_out)} "
            "held-out files, each must be at least 1; point it at a folder of Python sources"
        )
    return Corpus(train, held_out)


def installed_roots() -> list[Path]:
    """The standard library and every folder of installed packages that this Python imports from."""
    packages = [Path(p) for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    folders = [STANDARD_LIBRARY, *(p for p in packages if p.is_dir())]
    return list(dict.fromkeys(folder.resolve() for folder in folders))


def bounded(documents: Iterable[Document], max_characters: int) -> list[Document]:
    """Choose documents in the order of a hash of the path, up to ``max_characters`` in all.

    Returns:
        Chosen documents, sorted by path.
    """
    kept, characters = [], 0
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.path.encode()).digest()[8:]):
        characters += len(document.text)
        if characters > max_characters:
            break
        kept.append(document)
    return sorted(kept, key=lambda d: d.path)


def is_held_out(path: str) -> bool:
    """Whether a file is held out, by its relative POSIX path alone."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) % HELD_OUT_ONE_IN == 0


def drop_duplicates(documents: Iterable[Document]) -> list[Document]:
    """Sort by path and keep the first document of each text."""
    unique: dict[str, Document] = {}
    for document in sorted(documents, key=lambda d: d.path):
        unique.setdefault(document.text, document)
    return list(unique.values())


def calibration_text(corpus: Corpus) -> str:
    """Beginnings of training files, taken at equal distances from the sorted list of files."""
    spread = corpus.train[:: max(1, len(corpus.train) // CALIBRATION_FILES)]
    return "\n\n".join(document.text[:CALIBRATION_CHARACTERS] for document in spread)


def _read_documents(root: Path) -> list[Document]:
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        paths += [(Path(folder) / name).relative_to(root).as_posix() for name in files]
    usable = [
        path
        for path in paths
        if path.endswith(".py")
        and path not in SKIPPED_FILES
        and not path.startswith(SKIPPED_PREFIXES)
    ]
    with ThreadPoolExecutor() as pool:
        documents = pool.map(lambda path: _read_document(root, path), usable)
        return [document for document in documents if document is not None]


def _read_document(root: Path, path: str) -> Document | None:
    """Read a document; None if the text is too short, generated, or a table."""
    text = (root / path).read_text(encoding="utf-8", errors="replace")
    if path == "pydoc_data/topics.py":
        text = _topics_prose(text)
    if len(text) < MIN_CHARACTERS or GENERATED.search(text[:NOTICE_CHARACTERS]):
        return None
    return None if _is_table(text) else Document(path, text)


def _is_table(text: str) -> bool:
    if sum(map(text.count, "0123456789")) > MOST_DIGITS * len(text):
        return True
    if len(text) < LONG_CHARACTERS:
        return False
    data = text.encode()
    return len(zlib.compress(data, level=1)) < LEAST_COMPRESSED * len(data)


def _topics_prose(source: str) -> str:
    """Prose of the language reference in ``pydoc_data/topics.py``, as ``help()`` shows it."""
    assignment = next(node for node in ast.parse(source).body if isinstance(node, ast.Assign))
    topics: dict[str, str] = ast.literal_eval(assignment.value)
    return "\n\n".join(topics[name] for name in sorted(topics))
