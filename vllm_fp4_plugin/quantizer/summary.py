"""Summary of a run of the quantiser."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from rich.filesize import decimal
from rich.table import Table


@dataclass(frozen=True)
class Summary:
    """Figures of a quantised checkpoint.

    Attributes:
        dst: folder of the checkpoint.
        quantized: number of quantised linears.
        kept: number of linears left unquantised.
        bytes_before: bytes of all source tensors.
        bytes_after: bytes of all written tensors.
        bits_per_weight: bits per weight of the quantised linears, scales included.
        mean_relative_mse: mean over quantised weights of ‖dequantised - original‖² / ‖original‖²;
            None for a dry run.
        calibration_tokens: number of tokens the input scales were measured on; 0 for a weight-only
            checkpoint.
        relative_mse_by_type: mean relative MSE by type of linear, such as ``q_proj`` or
            ``experts.gate_proj``; empty for a dry run.
        estimated_seconds: for a dry run, the estimated time to quantise the weights, without
            calibration; else None.
    """

    dst: Path
    quantized: int
    kept: int
    bytes_before: int
    bytes_after: int
    bits_per_weight: float
    mean_relative_mse: float | None
    calibration_tokens: int
    relative_mse_by_type: dict[str, float] = field(default_factory=dict)
    estimated_seconds: float | None = None

    def table(self) -> Table:
        """Make a terminal table of the figures."""
        activations = "16-bit (weight-only)"
        is_dry = self.estimated_seconds is not None
        if self.calibration_tokens:
            measured = "to be measured" if is_dry else "measured"
            activations = f"NVFP4, {measured} on {self.calibration_tokens:,} tokens"
        table = Table(show_header=False)
        table.add_row("linears", f"{self.quantized} quantised, {self.kept} kept")
        table.add_row("activations", activations)
        table.add_row("size", f"{decimal(self.bytes_before)} → {decimal(self.bytes_after)}")
        table.add_row("bits per quantised weight", f"{self.bits_per_weight:.3f}")
        if self.mean_relative_mse is not None:
            table.add_row("mean relative MSE of weights", f"{self.mean_relative_mse:.5f}")
        for type, error in self.relative_mse_by_type.items():
            table.add_row(f"  {type}", f"{error:.5f}")
        if self.estimated_seconds is not None:
            seconds = timedelta(seconds=math.ceil(self.estimated_seconds))
            besides = ", and the time to calibrate" if self.calibration_tokens else ""
            table.add_row("time to quantise, about", f"{seconds}{besides}")
            table.add_row("nothing written to", str(self.dst))
        else:
            table.add_row("written to", str(self.dst))
        return table


def mean_by_type(errors: Mapping[str, float]) -> dict[str, float]:
    """Mean error by type of linear; linears of experts are types of their own."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, error in errors.items():
        *above, leaf = name.split(".")
        found[f"experts.{leaf}" if "experts" in above else leaf].append(error)
    return {type: fmean(each) for type, each in found.items()}
