"""Table of a model's weights by kind, on this device and in the checkpoint's files."""

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from vllm_fp4_plugin.checkpoint import weight_account
from vllm_fp4_plugin.checkpoint.files import TensorHeader
from vllm_fp4_plugin.checkpoint.weight_account import KINDS, Part, WeightAccount


def lines(
    here: WeightAccount | None, headers: Mapping[str, TensorHeader]
) -> Iterator[RenderableType]:
    """Yield the table of weights, then a line with the size of the files, as far as known.

    Args:
        here: weights as a device holds them; None: not known.
        headers: headers of the checkpoint's tensors; empty: not known.
    """
    files = weight_account.of_files(headers) if headers else None
    columns = {"in memory, one rank": here, "in the files": files}
    known = {name: account for name, account in columns.items() if account is not None}
    if not known:
        return
    yield _table(known)
    if files is not None:
        whole = weight_account.files_nbytes(headers)
        yield (
            f"files: {whole:,} bytes, {files.nbytes:,} of tensors and {whole - files.nbytes:,} of "
            "headers"
        )


def _table(columns: Mapping[str, WeightAccount]) -> Table:
    table = Table(title="weights", title_justify="left", show_footer=True)
    table.add_column("kind", footer="all")
    for name, account in columns.items():
        table.add_column(f"bytes {name}", justify="right", footer=f"{account.nbytes:,}")
        total = Part(elements=account.elements, nbytes=account.nbytes)
        table.add_column("bytes per weight", justify="right", footer=_each(total))
    table.add_column("modules")
    for kind in KINDS:
        parts = [account.parts.get(kind) for account in columns.values()]
        present = [part for part in parts if part is not None]
        if not present:
            continue
        cells = [cell for part in parts for cell in _cells(part)]
        table.add_row(kind, *cells, escape(_modules(present[0])))
    return table


def _cells(part: Part | None) -> tuple[str, str]:
    return ("0", "") if part is None else (f"{part.nbytes:,}", _each(part))


def _each(part: Part) -> str:
    return f"{part.bytes_per_weight:.4f}" if part.elements else ""


def _modules(part: Part) -> str:
    return ", ".join(
        name if count == 1 else f"{name} ×{count}" for name, count in part.names.items()
    )
