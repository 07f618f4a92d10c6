"""Case of tensor maps of small tensors: the driver's encoding, and a GEMM that uses such maps."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels.devices import (
    LAST_DEFECTIVE_DRIVER,
    SMALL_MAP_BYTES,
    defective_map_bytes,
    driver_version,
)
from nvfp4_kernels.gemm.sm100.tile import Tile
from nvfp4_kernels.tool.forced_product_case import SECTION, ForcedProductCase
from nvfp4_kernels.tool.task import Figures, Machine, Mismatch

WORDS = 16  # of 64 bits in a tensor map
DEFECT_BIT = 1 << 21  # of the second one
ROW_BYTES = 256


@dataclass(frozen=True)
class SmallMapsCase:
    """Test of maps of tensors below 128 KiB, which drivers up to CUDA 13.1 may encode wrongly.

    Attributes:
        section, name: section and name in the report.
    """

    section: str = SECTION
    name: str = "small tensor maps"

    def run(self, machine: Machine) -> Figures:
        """Compare the maps of a small and a large tensor, then check a GEMM of small tensors.

        Raises:
            Mismatch: a driver that is assumed sound has the defect, or the GEMM's result is wrong.
        """
        figures: Figures = {}
        if machine.device.type == "cuda":
            figures = self._compare(machine.device)
        product = ForcedProductCase(self.name, (Tile(64), Tile(8, swap_ab=True)), 8, 64, 512)
        return figures | product.run(machine)

    def _compare(self, device: torch.device) -> Figures:
        """Compare the bit that a defective driver sets differently in a small tensor's map."""
        small, large = (
            driver_map(
                torch.empty(nbytes // ROW_BYTES, ROW_BYTES, dtype=torch.uint8, device=device)
            )
            for nbytes in (SMALL_MAP_BYTES // 2, SMALL_MAP_BYTES * 2)
        )
        bits = [bool(words[1] & DEFECT_BIT) for words in (small, large)]
        version, mended = driver_version(), defective_map_bytes(device) > 0
        if bits[0] != bits[1] and not mended:
            raise Mismatch(
                f"driver of CUDA {version}: sets bit 21 of a small tensor map's second word to "
                f"{bits[0]:d} and of a large one's to {bits[1]:d}, must set it alike after "
                f"{LAST_DEFECTIVE_DRIVER}; install another driver, and raise LAST_DEFECTIVE_DRIVER"
            )
        seen = {"small": bits[0], "large": bits[1], "mended": mended}
        return {name: str(value) for name, value in seen.items()}


def driver_map(x: Tensor) -> list[int]:
    """Words of the tensor map that the driver encodes for the byte matrix ``x``.

    Raises:
        RuntimeError: the driver refuses the matrix.
    """
    from cuda.bindings import driver

    (rows, columns), one = x.shape, driver.cuuint32_t(1)
    error, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2,
        x.data_ptr(),
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(columns)],
        [driver.cuuint32_t(128), driver.cuuint32_t(64)],
        [one, one],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error):
        raise RuntimeError(f"cuTensorMapEncodeTiled: {error}, must be made; check the driver")
    return list((ctypes.c_uint64 * WORDS).from_address(int(made.getPtr())))
