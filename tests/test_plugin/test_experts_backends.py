"""What the report says of arithmetic where vLLM chooses what experts run on."""

from enum import Enum
from types import SimpleNamespace

import pytest

from vllm_fp4_plugin.experts.vllm_methods import keeps_16_bits

Backend = Enum("Backend", ["MARLIN", "HUMMING", "VLLM_CUTLASS"])


@pytest.mark.parametrize(
    ("name", "setting", "kept"),
    [
        ("MARLIN", "", True),
        ("HUMMING", "", True),
        ("HUMMING", '{"dtype": "float8e4m3"}', False),
        ("VLLM_CUTLASS", "", False),
    ],
)
def test_who_keeps_activations_in_16_bits(
    name: str, setting: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting:
        monkeypatch.setenv("VLLM_HUMMING_INPUT_QUANT_CONFIG", setting)
    assert keeps_16_bits(SimpleNamespace(nvfp4_backend=Backend[name])) is kept
