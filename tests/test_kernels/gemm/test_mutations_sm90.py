"""Mistakes made on purpose in the GEMM of sm_90, each reported or seen in the numbers."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nvfp4_kernels.fragments import decode_fragments
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.sm90.limits import ActDtype
from tests import devices
from tests.devices import KernelDevice
from tests.emulator import STANDARD, Gpu
from tests.emulator.findings import MissingDependencyWait
from tests.test_kernels.gemm.mutants_sm90 import MISTAKES, PRODUCTS, Product
from tests.test_kernels.gemm.test_tiles_sm90 import run, weight
from tests.test_kernels.noticed import NOTHING, noticed

PACKAGE = "nvfp4_kernels.gemm.sm90"
ARCHITECTURE = "nvfp4_kernels.sm90"


@contextmanager
def source(
    package: str, folder: Path, module: str = "", right: str = "", wrong: str = ""
) -> Iterator[None]:
    """Within, kernels of ``package`` are made of a copy of its source, with one place changed.

    ``module`` is one of ``package``, or of ``nvfp4_kernels.sm90``, which is copied with it.
    """
    packages = [importlib.import_module(name) for name in (package, ARCHITECTURE)]
    copies = [folder / copied.__name__ for copied in packages]
    for copied, copy in zip(packages, copies, strict=True):
        assert copied.__file__ is not None
        original = Path(copied.__file__).parent
        shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if module:
        [file] = [f for copy in copies if (f := copy / f"{module}.py").exists()]
        text = file.read_text()
        assert text.count(right) == 1, f"{right!r} is {text.count(right)} times in {module}"
        file.write_text(text.replace(right, wrong))
    with pytest.MonkeyPatch.context() as patch:
        for copied, copy in zip(packages, copies, strict=True):
            # `from package import module` finds a module by the package's attribute too.
            for name in _loaded(copied):
                patch.delattr(copied, name)
                patch.delitem(sys.modules, f"{copied.__name__}.{name}")
            patch.setattr(copied, "__path__", [str(copy)])
        importlib.invalidate_caches()
        try:
            yield
        finally:
            for copied in packages:
                for name in _loaded(copied):
                    delattr(copied, name)
                    del sys.modules[f"{copied.__name__}.{name}"]


def _loaded(package: ModuleType) -> list[str]:
    prefix = f"{package.__name__}."
    return [name.removeprefix(prefix) for name in sys.modules if name.startswith(prefix)]


def check(device: KernelDevice, given: Product) -> None:
    """The kernel's numbers are those of the formula."""
    m, n, k, tile = given.m, given.n, given.k, given.tile
    torch.manual_seed(0)
    dtype: dict[ActDtype, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    x = torch.randint(-2, 3, (m, k)).to(dtype[given.output.act])
    weights = [weight(n, k) for _ in range(tile.weights)]
    alpha = 2.0 ** torch.arange(max(given.output.shards, tile.weights))
    bias = torch.randint(-64, 65, (n,)).bfloat16() if given.output.bias else None
    out = run(
        device, tile, given.output, x, weights, n, given.sms, alpha, bias, given.ends
    ).double()
    products = [x.double() @ decode_fragments(*w, n, k).double().T for w in weights]
    if tile.weights == 2:
        # A rounding of the result, and what exp2 and rcp leave of the smallest.
        exact = torch.nn.functional.silu(products[0]) * products[1] * alpha[1]
        assert ((out - exact).abs() <= 2.0**-7 * exact.abs() + 1e-4).all()
        return
    shard = torch.bucketize(torch.arange(n), torch.tensor(given.ends, dtype=torch.long), right=True)
    exact = products[0] * alpha[shard] + (0 if bias is None else bias.double())
    assert torch.equal(out, exact.bfloat16().double())


def outcome(given: Product) -> str:
    """The first thing that is noticed, over all schedules."""
    for schedule in STANDARD:
        with devices.emulated(schedule, "sm_90") as device:
            found = noticed(lambda: check(device, given))
            if found != NOTHING:
                return found
    return NOTHING


@pytest.mark.parametrize("name", MISTAKES)
def test_caught(name: str, tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    mistake = MISTAKES[name]
    with source(PACKAGE, tmp_path / "sm90", mistake.module, mistake.right, mistake.wrong):
        assert outcome(mistake.on) == mistake.caught


@pytest.mark.parametrize("given", PRODUCTS.values(), ids=PRODUCTS)
def test_nothing_to_catch(given: Product, tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    with source(PACKAGE, tmp_path / "sm90"):
        assert outcome(given) == NOTHING


def two_products() -> None:
    """The second kernel reads what the first one writes, and may start before it has ended."""
    tile = Tile(8, max_stages=2)
    with devices.emulated(STANDARD[0], "sm_90") as device:
        x = torch.ones(5, 128, dtype=torch.bfloat16)
        between = run(device, tile, EpilogueConfig(), x, [weight(128, 128)], 128, 1)
        run(device, tile, EpilogueConfig(), between, [weight(64, 128)], 64, 1)


def test_a_kernel_waits_for_the_one_before(tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    with source(PACKAGE, tmp_path / "right"):
        two_products()
    wait = "ptx.griddepcontrol(ptx.GridDepAction.WAIT)"
    with (
        source(PACKAGE, tmp_path / "wrong", "loader", wait, "pass"),
        pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"),
    ):
        two_products()


def waits_before_it_lets_the_next_start(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Of the kernels that ``two_products`` compiles."""
    seen: list[str] = []
    load = Gpu.load
    monkeypatch.setattr(Gpu, "load", lambda gpu, ptx: (seen.append(ptx), load(gpu, ptx))[1])
    two_products()
    assert seen
    return all(
        0 <= ptx.rfind("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")
        for ptx in seen
    )


def test_the_next_kernel_starts_after_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may then read, without waiting, whatever ran before; in two launches nothing shows it."""
    devices.cutlass_or_skip()
    with source(PACKAGE, tmp_path / "right"):
        assert waits_before_it_lets_the_next_start(monkeypatch)
    wait = "ptx.griddepcontrol(ptx.GridDepAction.WAIT)"
    early = f"{wait.replace('WAIT', 'LAUNCH_DEPENDENTS')}\n        {wait}"
    with source(PACKAGE, tmp_path / "wrong", "loader", wait, early):
        assert not waits_before_it_lets_the_next_start(monkeypatch)
