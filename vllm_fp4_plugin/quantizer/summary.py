"""Summary of a run of the quantiser."""

from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal
from rich.table import Table


@dataclass(frozen=True)
class Summary:
    """Figures of a quantised checkpoint.

    Attributes:
        dst: its folder.
        quantized: linears quantised.
        kept: linears left as they were.
        bytes_before: of all tensors of the source.
        bytes_after: of all tensors written.
        bits_per_weight: of the quantised linears, their scales included.
        mean_relative_mse: mean over quantised weights of ‖dequantised - original‖² / ‖original‖².
        calibration_tokens: tokens the input scales were measured on; 0 for a weight-only
            checkpoint.
    """

    dst: Path
    quantized: int
    kept: int
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    mean_relative_mse: float
    calibration_tokens: int

    def table(self) -> Table:
        """Make a table of the figures for a terminal."""
        activations = "16-bit (weight-only)"
        if self.calibration_tokens:
            activations = f"NVFP4, measured on {self.calibration_tokens:,} tokens"
        table = Table(show_header=False)
        table.add_row("linears", f"{self.quantized} quantised, {self.kept} kept")
        table.add_row("activations", activations)
        table.add_row("size", f"{decimal(self.bytes_before)} → {decimal(self.bytes_after)}")
        table.add_row("bits per quantised weight", f"{self.bits_per_weight:.3f}")
        table.add_row("mean relative MSE of weights", f"{self.mean_relative_mse:.5f}")
        table.add_row("written to", str(self.dst))
        return table
