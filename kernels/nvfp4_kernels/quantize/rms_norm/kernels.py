"""Kernel tables of ``rms_norm_quantize`` and ``add_rms_norm_quantize``, by form.

Forms that differ in the format alone share a table, in which the mode tells the format.
"""

from nvfp4_kernels.dispatch import KernelTable
from nvfp4_kernels.quantize.rms_norm.arguments import FORMS, Form

_MODULE = "nvfp4_kernels.quantize.rms_norm"
_REFERENCE = ("reference", f"{_MODULE}.reference:rms_norm_quantize")
_SM90 = ("RmsNormQuantizeFp8Sm90", f"{_MODULE}.sm90:rms_norm_quantize")
_SM100 = f"{_MODULE}.sm100:rms_norm_quantize"


def _table(form: Form) -> KernelTable:
    return KernelTable(
        form.name,
        {
            ("cpu", "w4a4", "w4a8"): _REFERENCE,
            ("sm_90", "w4a8"): _SM90,
            ("sm_100", "w4a4"): ("RmsNormQuantizeSm100", _SM100),
        },
        {
            # torch adds up each row by itself.
            ("cpu", "w4a4", "w4a8"): _REFERENCE,
            ("sm_90", "w4a8"): _SM90,  # the layout of a row depends on K alone
            ("sm_100", "w4a4"): ("RmsNormQuantizeSm100", f"{_SM100}_batch_invariant"),
        },
    )


_TABLES = {form: _table(form) for form in FORMS if not form.fp8}
KERNELS: dict[Form, KernelTable] = {form: _TABLES[form._replace(fp8=False)] for form in FORMS}
