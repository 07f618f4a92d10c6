"""The benchmark of a decoder layer without a GPU: its arithmetic on a CPU, and candidate tiles."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.kernel_bench.layer import (
    LARGEST,
    MODELS,
    PRODUCTS,
    Activation,
    Shape,
    forward,
    layer_of,
    product_of,
    shape_of,
    step_of,
)
from examples.kernel_bench.layer_tiles import chosen, said, tiles_of
from nvfp4_kernels.gemm.sm90 import choose, choose_fp8
from nvfp4_kernels.gemm.sm90.choose import with_store
from nvfp4_kernels.gemm.sm90.tile import MAX_STAGES, EpilogueConfig, Tile
from tests import devices

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SHAPE = Shape(hidden=256, intermediate=384, heads=4, kv_heads=2, head_dim=64)
TOKENS, KEYS, PAGES = 3, 20, 6
ACTIVATIONS: tuple[Activation, ...] = ("16-bit", "fp8")
COMPILE = """
from examples.kernel_bench.layer import product_of, shape_of
from examples.kernel_bench.layer_tiles import compile_tile, tiles_of
from nvfp4_kernels.gemm.sm90.kernel import WeightOnlyGemm
from nvfp4_kernels.runtime.compile import object_path

problem, output = product_of(shape_of("llama-8b"), "gate_up_proj", 1, "fp8")
choice = tiles_of(problem, output)[-1]
for _ in range(2):
    compile_tile(choice)
    place = object_path(WeightOnlyGemm(*choice))
    print(place.name, place.stat().st_mtime_ns)
"""


def run_layer(activation: Activation) -> torch.Tensor:
    torch.manual_seed(0)
    layer = layer_of(SHAPE, PAGES, activation, CPU)
    torch.manual_seed(1)
    return forward(layer, step_of(SHAPE, TOKENS, KEYS, CPU))


def test_layers_of_either_arithmetic_differ_by_rounding():
    exact, fp8 = (run_layer(activation).float() for activation in ACTIVATIONS)
    assert exact.shape == (TOKENS, SHAPE.hidden)
    assert 0.3 < exact.std() < LARGEST / 3  # few activations saturate
    assert 0.02 < (fp8 - exact).norm() / exact.norm() < 0.1


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 128, 512])
def test_candidates_fit_and_the_usual_tile_is_one(model, tokens, activation):
    chooser = choose_fp8 if activation == "fp8" else choose
    for name in PRODUCTS:
        problem, output = product_of(shape_of(model), name, tokens, activation)
        found = tiles_of(problem, output)
        assert all(chooser.fits(problem, *choice) for choice in found)
        assert all(tile.fp8 == (activation == "fp8") for tile, _ in found)
        assert all(out == with_store(output, tile, problem.n) for tile, out in found)
        assert len({said(choice) for choice in found}) == len(found) > 5
        usual, _ = chooser.choose_config(problem, output)
        assert usual in [replace(t, max_stages=usual.max_stages) for t, _ in found]


def test_products_in_fp8_have_the_plugin_s_epilogues():
    outputs = {name: product_of(SHAPE, name, 1, "fp8")[1] for name in PRODUCTS}
    assert {output.act for output in outputs.values()} == {"float8_e4m3fn"}
    assert [name for name, output in outputs.items() if output.is_fp8] == ["gate_up_proj"]
    problem, _ = product_of(replace(SHAPE, intermediate=80), "down_proj", 1, "fp8")
    assert problem.k == 128  # E4M3 rows are padded


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_chosen_tile_serves_its_problem_alone(activation):
    devices.cutlass_or_skip()
    devices.bind_cutlass()
    from nvfp4_kernels.gemm.sm90 import launch

    problem, output = product_of(SHAPE, "o_proj", TOKENS, activation)
    other, _ = product_of(SHAPE, "down_proj", TOKENS, activation)
    tile = Tile(8, warpgroups=1, max_stages=MAX_STAGES - 1, fp8=activation == "fp8")

    def choice_of(of):
        owner = choose_fp8 if activation == "fp8" else launch
        return owner.choose_config(of, EpilogueConfig(act=output.act), 132)

    before = choice_of(problem), choice_of(other)
    with chosen(problem, (tile, output)):
        assert choice_of(problem) == (tile, output)
        assert choice_of(other) == before[1]
    with pytest.raises(ZeroDivisionError), chosen(problem, (tile, output)):
        raise ZeroDivisionError
    assert (choice_of(problem), choice_of(other)) == before


@pytest.mark.processes
def test_a_candidate_is_compiled_once_without_a_gpu(tmp_path):
    devices.cutlass_or_skip()
    environment = os.environ | {
        "CUTE_DSL_ARCH": "sm_90a",
        "NVFP4_KERNELS_CACHE": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True
    )
    first, second = ran.stdout.split("\n")[:2]
    assert first == second
    assert [file.name for file in tmp_path.glob("*.o")] == [first.split()[0]]
