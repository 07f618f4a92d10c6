"""The benchmark of a decoder layer with the kernels of sm_90 on the emulator."""

import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from examples.kernel_bench import layer as command
from examples.kernel_bench.layer import PRODUCTS, product_of
from examples.kernel_bench.layer_tiles import chosen
from nvfp4_kernels.gemm.sm90.choose import with_store
from nvfp4_kernels.gemm.sm90.tile import Tile
from tests import devices
from tests.emulator import EAGER
from tests.test_examples import fake_cuda
from tests.test_examples.test_kernel_bench_layer import (
    ACTIVATIONS,
    CPU,
    KEYS,
    SHAPE,
    TOKENS,
    run_layer,
)

pytestmark = pytest.mark.parametrize("activation", ACTIVATIONS)


def split_tile(name, activation):
    """Choice that the chooser does not make: K in two parts, two warpgroups."""
    problem, output = product_of(SHAPE, name, TOKENS, activation)
    tile = Tile(8, problem.weights, split_k=2, max_stages=3, fp8=activation == "fp8")
    return problem, (tile, with_store(output, tile, problem.n))


@contextmanager
def products():
    """Context that lists the kernels of the products as they are launched."""
    from nvfp4_kernels.gemm.sm90 import launch

    found = []

    def noted(kernel, arguments):
        found.append(kernel)
        return given(kernel, arguments)

    given = launch.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "launch", noted)
        yield found


def check_near(found, expected, activation):
    """Check a layer's result: sums in another order move some elements by a step of their format.

    Errors of .004 and .024 were seen; the two arithmetics are .06 apart.
    """
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < {"16-bit": 0.01, "fp8": 0.04}[activation]


def test_kernels_are_as_near_as_rounding(activation):
    expected = run_layer(activation)
    with devices.emulated_ops(EAGER, "sm_90"):
        found = run_layer(activation)
    check_near(found, expected, activation)


def test_a_candidate_is_launched_in_its_place_as_it_is_compiled(activation):
    with devices.emulated_ops(EAGER, "sm_90"), products() as usual:
        expected = run_layer(activation)
    for place, name in enumerate(PRODUCTS):
        problem, choice = split_tile(name, activation)
        with devices.emulated_ops(EAGER, "sm_90"), products() as found, chosen(problem, choice):
            from nvfp4_kernels.gemm.sm90.kernel import WeightOnlyGemm

            result = run_layer(activation)
        assert found[place] == WeightOnlyGemm(*choice)  # the kernel that compile_tile compiles
        assert found[place] != usual[place]
        assert found[:place] + found[place + 1 :] == usual[:place] + usual[place + 1 :]
        check_near(result, expected, activation)


def test_command_times_the_layer_with_each_candidate(activation, monkeypatch, capsys):
    compiled = []

    class Pool:
        def __init__(self, mp_context):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def map(self, function, choices):
            assert function is command.compile_tile
            compiled.extend(choices)
            return []

    def two(problem, output):
        _, (tile, out) = split_tile("down_proj", activation)
        return [(tile, out), (replace(tile, split_k=1), out)]

    fake_cuda.install(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Fake GPU")
    monkeypatch.setattr(command, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(command, "cuda_device", lambda: CPU)
    monkeypatch.setattr(command, "shape_of", lambda model: SHAPE)
    monkeypatch.setattr(command, "tiles_of", two)
    monkeypatch.setattr(command, "LAYERS", 1)
    arguments = ["--activation", activation, "--sweep", "down_proj", "--keys", str(KEYS)]
    monkeypatch.setattr(
        sys, "argv", ["layer", "--tokens", str(TOKENS), "--rounds", "2", *arguments]
    )
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    with devices.emulated_ops(EAGER, "sm_90"), products() as found:
        command.main()
    assert compiled == two(None, None)
    split_k = [kernel.tile.split_k for kernel in found if kernel.tile == compiled[0][0]]
    assert split_k == [2, 2]  # once before the graph is captured
    first, *rest = capsys.readouterr().out.splitlines()[1:]
    assert first == f"{TOKENS} tokens, {KEYS} keys, {activation}: 1000.00 us a layer"
    assert len(rest) == 2
    assert all(line.startswith("    down_proj 1000.00: 8 tokens, 2 warpgroups") for line in rest)
