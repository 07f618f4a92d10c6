"""Published wheel: files included, files left out, and metadata."""

import zipfile
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path

import pytest

import vllm_fp4_plugin
from tests.test_package.building import build

# Packages by their names in the wheel, and their folders in the checkout.
PACKAGES = {"nvfp4_kernels": "kernels/nvfp4_kernels", "vllm_fp4_plugin": "vllm_fp4_plugin"}
INFO = f"vllm_fp4_plugin-{vllm_fp4_plugin.__version__}.dist-info"
ENTRY_POINTS = {
    EntryPoint("nvfp4-kernels", "nvfp4_kernels.__main__:app", "console_scripts"),
    EntryPoint("nvfp4-tc", "vllm_fp4_plugin.__main__:app", "console_scripts"),
    EntryPoint("nvfp4_tc", "vllm_fp4_plugin:register", "vllm.general_plugins"),
    EntryPoint("nvfp4_tc", "vllm_fp4_plugin.engine.platform:activate", "vllm.platform_plugins"),
}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def distribution(wheel: Path) -> PathDistribution:
    return PathDistribution(zipfile.Path(wheel, f"{INFO}/"))


def test_every_file_of_the_packages_and_no_other(source: Path, wheel: Path) -> None:
    expected = {
        f"{package}/{file.relative_to(source / folder)}"
        for package, folder in PACKAGES.items()
        for file in (source / folder).rglob("*")
        if file.is_file() and file.suffix != ".md"  # pages for readers of a clone
    }
    info = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    assert contents(wheel).keys() == expected | {f"{INFO}/{name}" for name in info}


def test_both_packages_are_typed(wheel: Path) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= contents(wheel).keys()


def test_wheel_of_the_checkout_is_the_same(
    source: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    of_checkout = build("build_wheel", source, tmp_path_factory.mktemp("of-checkout"))
    assert of_checkout.name == wheel.name
    assert contents(of_checkout) == contents(wheel)


def test_entry_points(distribution: PathDistribution) -> None:
    assert set(distribution.entry_points) == ENTRY_POINTS


def test_metadata(source: Path, distribution: PathDistribution) -> None:
    metadata = distribution.metadata
    assert metadata["Name"] == "vllm-fp4-plugin"
    assert metadata["Version"] == vllm_fp4_plugin.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Description"] == (source / "README.md").read_text()
    assert {"Environment :: GPU :: NVIDIA CUDA", "Typing :: Typed"} <= set(
        metadata.get_all("Classifier", [])
    )


def test_license_is_the_checkouts(source: Path, wheel: Path) -> None:
    assert contents(wheel)[f"{INFO}/licenses/LICENSE"] == (source / "LICENSE").read_bytes()


def test_vllm_comes_by_an_extra_alone(distribution: PathDistribution) -> None:
    """A plain requirement would bring half of the users a second, wrong build of vLLM."""
    required = distribution.requires or []
    vllm = [each for each in required if each.startswith("vllm")]
    assert sorted(each.partition(";")[2].strip() for each in vllm) == [
        'extra == "cpu"',
        'extra == "cuda"',
    ]
