"""Properties of devices (architecture and family, SM count), and names of dtypes."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the command line tells architectures without torch
    import torch

# Family of each architecture, named after its first member. An architecture runs its family's
# kernels, compiled for the architecture itself.
FAMILIES = {"sm_90": "sm_90", "sm_100": "sm_100", "sm_103": "sm_100"}
# Common names of their GPUs.
GPUS = {"sm_90": "H100, H200", "sm_100": "B200, GB200", "sm_103": "B300, GB300"}
# Streaming multiprocessors where no GPU can be asked: of an H200, a B200 and a GB300.
SM_COUNTS = {"sm_90": 132, "sm_100": 148, "sm_103": 152}
ELEMENT_BITS: dict[str, int] = {
    "bfloat16": 16,
    "float16": 16,
    "float32": 32,
    "float8_e4m3fn": 8,
    "nvfp4": 4,
}

# GPCs of the data-centre GPUs; SMs are assumed to be spread over GPCs in pairs, as evenly as
# possible, though chips differ. A cluster lies in one GPC.
GPCS = 8

LAST_DEFECTIVE_DRIVER, SMALL_MAP_BYTES = 13010, 131072  # see ``defective_map_bytes``

# Architecture that a device type stands in for; a test's emulator runs CPU tensors as such a GPU.
_STAND_INS: dict[str, str] = {}
_epoch = 0  # incremented by each change


@contextmanager
def standing_in(device_type: str, arch: str) -> Iterator[None]:
    """Context in which ops treat tensors on ``device_type`` as if on a GPU of ``arch``."""
    global _epoch
    before = dict(_STAND_INS)
    _STAND_INS[device_type] = arch
    _epoch += 1
    try:
        yield
    finally:
        _STAND_INS.clear()
        _STAND_INS.update(before)
        _epoch += 1


def stand_in_epoch() -> int:
    """Number that changes whenever a ``standing_in`` context is entered or left."""
    return _epoch


def is_reference_device(device: "torch.device") -> bool:
    """Whether ops on ``device`` run their references: on a CPU that does not stand in for a GPU."""
    return device.type == "cpu" and "cpu" not in _STAND_INS


def device_arch(device: "torch.device") -> str:
    """Architecture of a device: ``"sm_<major><minor>"`` for CUDA, else its type, e.g. ``"cpu"``."""
    if device.type in _STAND_INS:
        return _STAND_INS[device.type]
    if device.type != "cuda":
        return device.type
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def device_family(device: "torch.device") -> str:
    """Family of a device's architecture; the architecture itself if it has no family."""
    arch = device_arch(device)
    return FAMILIES.get(arch, arch)


class UnknownArchitecture(ValueError):
    """Architecture, given as an option, that the command does not serve."""


def members(family: str) -> tuple[str, ...]:
    """Architectures that run a family's kernels, e.g. ``"sm_100"`` and ``"sm_103"``."""
    return tuple(arch for arch, of in FAMILIES.items() if of == family)


def target_of(arch: str) -> str:
    """Compilation target of an architecture as CuTe spells it: ``"sm_103a"`` for ``"sm_103"``."""
    return f"{arch}a"


def spellings(archs: Iterable[str] = FAMILIES) -> str:
    """List of the names that ``parse_arch`` accepts, with GPUs, for help and error messages."""
    return ", ".join(
        f"{arch} or {target_of(arch)} ({GPUS[arch]})" if arch in FAMILIES else arch
        for arch in archs
    )


def parse_arch(option: str, text: str, archs: Iterable[str] = FAMILIES) -> str:
    """Architecture that a command's option names, directly or by the compilation target.

    Args:
        option: name of the option, for the error.
        text: value of the option, e.g. ``"sm_100"`` or ``"sm_100a"``.
        archs: architectures that the command serves; may include ``"cpu"``, which has no target.

    Raises:
        UnknownArchitecture: ``text`` names no architecture that the command serves.
    """
    archs = tuple(archs)
    found = {target_of(arch): arch for arch in archs if arch in FAMILIES}
    found |= {arch: arch for arch in archs}
    if text not in found:
        raise UnknownArchitecture(
            f"{option}: is {text!r}, must be one of {spellings(archs)}; name one, spelt so"
        )
    return found[text]


class DeviceFacts(NamedTuple):
    """Facts of a device on which launches depend; see ``device_facts``.

    Attributes:
        device: the device, with its index if a GPU.
        arch: architecture, see ``device_arch``.
        sms: number of SMs of the GPU, or of the GPU that the device stands in for; 0 for other
            devices.
    """

    device: "torch.device"
    arch: str
    sms: int

    @property
    def defective_map_bytes(self) -> int:
        """Tensor size below which tensor maps may be wrong; see the function of that name."""
        return defective_map_bytes(self.device)

    def max_clusters(self, ctas: int) -> int:
        """Maximum number of resident clusters of ``ctas`` CTAs, one CTA per SM.

        The driver's answer for a GPU; ``assumed_clusters`` for a device that stands in for a GPU.
        """
        if ctas == 1 or self.device.type != "cuda":
            return assumed_clusters(self.sms, ctas)
        return _max_clusters(self.device, ctas)


def device_facts(device: "torch.device") -> DeviceFacts:
    """Facts of a device; queried once per GPU, then cached."""
    if device.type == "cuda":
        return _current_facts() if device.index is None else _gpu_facts(device)
    arch = device_arch(device)
    return DeviceFacts(device, arch, SM_COUNTS.get(arch, 0))


def _current_facts() -> DeviceFacts:
    import torch

    return _gpu_facts(torch.device("cuda", torch.cuda.current_device()))


@functools.cache
def _gpu_facts(device: "torch.device") -> DeviceFacts:
    import torch

    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return DeviceFacts(device, device_arch(device), sms)


def assumed_clusters(sms: int, ctas: int) -> int:
    """Assumed maximum number of resident clusters of ``ctas`` CTAs, one CTA per SM, on ``sms`` SMs.

    For choices that must work without a GPU; ``DeviceFacts.max_clusters`` queries the driver.
    """
    pairs = -(-sms // 2)
    sizes = [2 * ((pairs + number) // GPCS) for number in range(GPCS)]
    sizes[-1] -= 2 * pairs - sms
    return max(1, sum(size // ctas for size in sizes))


@functools.cache
def _max_clusters(device: "torch.device", ctas: int) -> int:
    import torch
    from cutlass.utils import HardwareInfo

    with torch.cuda.device(device):
        torch.cuda.current_stream()  # for a CUDA context
        index = torch.cuda.current_device()
        return int(HardwareInfo(index).get_max_active_clusters(ctas))


@functools.cache
def driver_version() -> int:
    """CUDA version that the driver supports, e.g. 13010 for 13.1.

    Raises:
        RuntimeError: there is no driver, or the driver does not report a version.
    """
    from cuda.bindings import driver

    error, version = driver.cuDriverGetVersion()
    if int(error) or not version:
        raise RuntimeError(f"CUDA driver: its version is unknown ({error}); install one")
    return int(version)


def defective_map_bytes(device: "torch.device") -> int:
    """Tensor size in bytes below which the driver may encode tensor maps wrongly; 0: no defect.

    With drivers up to CUDA 13.1, CUTLASS (``cute/atom/copy_traits_sm90_tma.hpp``) and
    ``nvfp4_kernels.sm100.tensor_maps`` clear a bit in the maps of small tensors. On an H200, driver
    580 (CUDA 13.0) does not set the bit; not checked on a Blackwell GPU.
    """
    if device.type != "cuda" or driver_version() > LAST_DEFECTIVE_DRIVER:
        return 0
    return SMALL_MAP_BYTES


def dtype_name(dtype: "torch.dtype") -> str:
    """Name of a dtype as kernels' configurations and messages spell it, e.g. ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
