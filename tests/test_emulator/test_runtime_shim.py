"""CuTe DSL on the installed runtime; scripts run in separate processes: installing is permanent."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.devices import cutlass_or_skip

cutlass_or_skip()
ROOT = Path(__file__).parents[2]

# A kernel module to import after installing: CuTe reads the source of compiled functions.
KERNEL = """
import ctypes
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_ptr


def adding(value):
    @cute.kernel
    def kernel(p: cute.Pointer, n: cutlass.Int32):
        t, _, _ = cute.arch.thread_idx()
        x = cute.make_tensor(p, cute.make_layout(n))
        if t < n:
            x[t] = x[t] + cutlass.Float32(value)

    @cute.jit
    def add(p: cute.Pointer, n: cutlass.Int32, stream: cuda.CUstream):
        kernel(p, n).launch(grid=(2, 1, 1), block=(64, 1, 1), cluster=(2, 1, 1), stream=stream)

    return add


memory = (ctypes.c_float * 64)()
address = ctypes.addressof(memory)
pointer = make_ptr(cutlass.Float32, address, cute.AddressSpace.gmem, assumed_align=16)
stream = cuda.CUstream(0)


def compiled(value):
    return cute.compile(adding(value), pointer, 5, stream)


def compiled_for_ffi(value):
    return cute.compile(adding(value), pointer, 5, make_fake_stream(), options="--enable-tvm-ffi")
"""

INSTALL = """
from tests.emulator.examples.recorder import Recorder
from tests.emulator.findings import DataRace
from tests.emulator.runtime import shim

class Failing(Recorder):
    def launch(self, *arguments, **attributes):
        raise RACE

RACE = DataRace("two writes")
device = Recorder()
runtime = shim.install(device)
from kernel import *
"""


def run(folder: Path, script: str, install: str = INSTALL) -> str:
    folder.joinpath("kernel.py").write_text(KERNEL)
    path = folder / "script.py"
    path.write_text(install + textwrap.dedent(script))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = subprocess.run(
        [sys.executable, str(path)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_launches_reach_the_device_and_findings_come_back(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        plain, ffi = runtime.bind(compiled(1.0)), compiled_for_ffi(1.0)
        plain(pointer, 5, stream)
        ffi(address, 7, 0)
        for launch in device.launches:
            assert launch["grid"] == (2, 1, 1) and launch["block"] == (64, 1, 1)
            assert launch["cluster"] == (2, 1, 1) and launch["parameter_bytes"] == [8, 4]
        assert len(device.launches) == 2
        (ptx, *_) = device._modules
        assert ".target sm_100a" in ptx and "kernel.py" in ptx and ".loc" in ptx

        runtime.device = Failing()
        for call in (lambda: plain(pointer, 5, stream), lambda: ffi(address, 7, 0)):
            try:
                call()
            except DataRace as error:
                assert error is RACE
            else:
                raise AssertionError("nothing was raised")

        runtime.device = device
        ffi(address, 7, 0)  # and nothing sticks
        assert len(device.launches) == 3
        """,
    )


def test_kernels_of_one_name_are_told_apart(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        one, two = compiled_for_ffi(1.0), compiled_for_ffi(2.0)
        two(address, 5, 0)
        one(address, 5, 0)
        assert device.launches[0]["kernel"] == device.launches[1]["kernel"]
        second, first = device._modules
        assert "0f40000000" in second and "0f3F800000" not in second
        assert "0f3F800000" in first and "0f40000000" not in first
        """,
    )


def test_cutes_caches_keep_the_ptx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = """
        from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction
        from tests.emulator.runtime.embedding import PtxEmbedding
        CudaDialectJitCompiledFunction.num_devices = 1  # what bind() does for compiled functions
        compilations = []
        compile = PtxEmbedding.compile
        PtxEmbedding.compile = lambda *a, **k: compilations.append(1) or compile(*a, **k)
        function = adding(3.0)
        for _ in range(3):
            function(pointer, 5, stream)
        assert len(device.launches) == 3
        print(len(compilations), len(device._modules))
        """
    assert run(tmp_path, script).split() == ["1", "1"]
    assert run(tmp_path, script).split() == ["0", "1"]


def test_exported_object_files_launch_too(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        import subprocess
        compiled_for_ffi(1.0).export_to_c("add.o", function_name="add")
        libraries = cute.runtime.find_runtime_libraries(enable_tvm_ffi=True)
        assert str(runtime.library) in libraries
        subprocess.run(["cc", "-shared", "-o", "add.so", "add.o", *libraries], check=True)
        cute.runtime.load_module("./add.so", enable_tvm_ffi=True).add(address, 5, 0)
        assert len(device.launches) == 1
        """,
    )


def test_installing_again(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        other = Recorder()
        assert shim.install(other) is runtime is shim.installed()
        compiled_for_ffi(1.0)(address, 5, 0)
        assert not device.launches and len(other.launches) == 1
        assert shim.install(other, "sm_90a") is runtime
        compiled_for_ffi(2.0)(address, 5, 0)
        compiled_for_ffi(1.0)(address, 5, 0)
        shim.install(other)
        compiled_for_ffi(3.0)(address, 5, 0)
        targets = [line for ptx in other._modules for line in ptx.split("\\n") if ".target" in line]
        assert targets == [".target sm_100a", ".target sm_90a", ".target sm_90a", ".target sm_100a"]
        """,
    )


def test_hopper_kernels(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        compiled_for_ffi(1.0)(address, 5, 0)
        assert ".target sm_90a" in next(iter(device._modules))
        """,
        INSTALL.replace("install(device)", 'install(device, "sm_90a")'),
    )


def test_too_late_is_an_error(tmp_path: Path) -> None:
    script = """
        import cutlass
        from tests.emulator.runtime import shim
        try:
            shim.install(None)
        except RuntimeError as error:
            assert "before the first import of cutlass" in str(error)
        else:
            raise AssertionError("nothing was raised")
        try:
            shim.install(None, "sm_80")
        except ValueError as error:
            assert "accepted are ['sm_100a', 'sm_103a', 'sm_90a']" in str(error)
        else:
            raise AssertionError("nothing was raised")
        """
    run(tmp_path, script, install="")
