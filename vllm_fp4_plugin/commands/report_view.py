"""Views of a report: rows of layers and the account of weights, as tables or as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from vllm_fp4_plugin.checkpoint import weight_account
from vllm_fp4_plugin.checkpoint.files import TensorHeader
from vllm_fp4_plugin.commands import command_line, weight_table
from vllm_fp4_plugin.report import Report


@dataclass(frozen=True)
class Row:
    """Row of the table of layers: a single layer, or equal layers of a group with their count."""

    layer: str
    count: int
    kernel: str
    arithmetic: str
    why: str


class ReportView(NamedTuple):
    """Report of a model, with the arguments of the command that shows it.

    Attributes:
        model: checkpoint directory or name on the hub, as given to the command.
        arch: architecture that the plan is for; empty: this machine's device.
        report: report of the layers.
        headers: headers of the model's tensors; empty: a file is missing on this machine.
        every_layer: whether each layer is a row of its own.
    """

    model: str
    arch: str
    report: Report
    headers: Mapping[str, TensorHeader]
    every_layer: bool

    def rows(self) -> list[Row]:
        """Rows of the table of layers."""
        if self.every_layer:
            return [_row(r.name, 1, r.kernel, r.arithmetic, r.reason) for r in self.report.layers]
        return [_row(*each) for each in self.report.grouped()]

    def print(self) -> None:
        """Print tables of layers and of weights."""
        console = command_line.output()
        where = f" for {self.arch}" if self.arch else ""
        title = escape(f"nvfp4-tc on {self.model}{where}")
        table = Table(title=title, title_justify="left")
        for name in (field.name for field in fields(Row)):
            table.add_column(name, justify="right" if name == "count" else "left")
        for row in self.rows():
            table.add_row(*(escape(str(cell)) for cell in astuple(row)))
        console.print(table)
        for part in weight_table.lines(self.report.weights, self.headers):
            console.print(part)

    def json(self) -> dict[str, Any]:
        """Report as a JSON object; ``report --help`` names the fields."""
        here = self.report.weights
        files = weight_account.of_files(self.headers) if self.headers else None
        sizes = None
        if files is not None:
            whole = weight_account.files_nbytes(self.headers)
            sizes = {"bytes": whole, "tensor_bytes": files.nbytes}
            sizes["header_bytes"] = whole - files.nbytes
        return {
            "model": self.model,
            "arch": self.arch,
            "layers": [asdict(row) for row in self.rows()],
            "weights": {
                "in_memory": None if here is None else here.json(),
                "in_files": None if files is None else files.json(),
            },
            "files": sizes,
            "notes": self.report.notes,
        }


def _row(layer: str, count: int, kernel: str, arithmetic: str, reason: str) -> Row:
    # Each device has one kernel for an op and arithmetic, so there is nothing else to say.
    return Row(layer, count, kernel, arithmetic, reason or "the only kernel for it")
