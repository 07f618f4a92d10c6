"""The pages: links resolve, limits name functions that exist, and the README stays short."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES, MAX_WORDS = 110, 700  # of the README
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FILE = re.compile(r"`((?:kernels|vllm_fp4_plugin)/[\w/]+\.py)[`:]")
NAMED = re.compile(r"`([\w/]+\.py): (\w+(?:, \w+)*)`")  # a file, and functions or classes in it
UNNAMED = re.compile(r"^\|.*`[\w/]+\.py`", re.MULTILINE)  # a table's row with a file alone
CODE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    return sorted(page for page in ROOT.rglob("*.md") if page.relative_to(ROOT).parts[0][0] != ".")


def anchors(page: Path) -> Iterator[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    for heading in HEADING.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        yield re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def broken(page: Path) -> Iterator[str]:
    """Links of a page to missing files or headings."""
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    assert list(broken(page)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    """Mutant: links to a missing file and to a missing heading are found; code is not a link."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A head: one\n[a](page.md#a-head-one) [b](#b) [c](c.md)\n```\n[d](d.md)\n```\n"
    )
    assert list(broken(page)) == ["#b", "c.md"]


@pytest.mark.parametrize("name", ["limits", "options"])
def test_files_that_enforce_a_limit_are_there(name: str) -> None:
    files = FILE.findall((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []


def defined(file: Path) -> set[str]:
    """Names of functions, methods and classes of a file, and of the module's constants."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    tree = ast.parse(file.read_text(encoding="utf-8"))
    targets = [t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets]
    constants = {target.id for target in targets if isinstance(target, ast.Name)}
    return constants | {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def undefined(text: str, root: Path) -> Iterator[str]:
    """Functions that a page names by file, and that the file does not define."""
    for file, names in NAMED.findall(text):
        path = root / file
        known = defined(path) if path.is_file() else set()
        yield from (f"{file}: {name}" for name in names.split(", ") if name not in known)


@pytest.mark.parametrize(
    ("page", "root"), [("docs/limits.md", "."), ("vllm_fp4_plugin/README.md", "vllm_fp4_plugin")]
)
def test_functions_that_a_page_names_are_there(page: str, root: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert NAMED.findall(text)
    assert list(undefined(text, ROOT / root)) == []


def test_every_limit_names_a_function() -> None:
    assert UNNAMED.findall((ROOT / "docs" / "limits.md").read_text(encoding="utf-8")) == []


def test_a_missing_function_is_found(tmp_path: Path) -> None:
    """Mutant: a function that a file lacks is found, and so is a missing file."""
    (tmp_path / "a.py").write_text("class A:\n    def here(self): ...\n")
    text = "| `a.py: here, gone` | `b.py: there` |\n"
    assert list(undefined(text, tmp_path)) == ["a.py: gone", "b.py: there"]
    assert UNNAMED.findall("| a | `a.py` |\n")


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert len(text.split()) <= MAX_WORDS
    assert not re.search("[¹²³⁴-⁹]", text), "footnotes go to docs/limits.md"
