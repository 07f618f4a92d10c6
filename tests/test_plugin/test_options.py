"""Options under ``--additional-config``: what is accepted, and what is refused by name."""

from types import SimpleNamespace

import pytest

from vllm_fp4_plugin.options import InvalidOption, Options


def test_defaults() -> None:
    assert Options.parse({}) == Options(True, "absmax", "per-token", (), True, None, "vllm")


def test_every_option_is_read() -> None:
    given = {
        "fuse_mlp": False,
        "scales": "sweep",
        "activation": "16-bit",
        "ignore": ["lm_head"],
        "norm_rope_kernels": False,
        "indexer_format": "nvfp4",
        "experts": "refuse",
    }
    expected = Options(False, "sweep", "16-bit", ("lm_head",), False, "nvfp4", "refuse")
    assert Options.parse(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fuse": True}, r"nvfp4_tc\.fuse: is unknown, must be one of fuse_mlp, scales"),
        (
            {"small_kernels": False},
            r"nvfp4_tc\.small_kernels: is now called norm_rope_kernels; rename it",
        ),
        ({"fuse_mlp": "no"}, r"nvfp4_tc\.fuse_mlp: is 'no', must be one of true, false"),
        ({"fuse_mlp": 1}, r"nvfp4_tc\.fuse_mlp: is 1, must be one of true, false"),
        ({"norm_rope_kernels": 0}, r"norm_rope_kernels: is 0, must be one of true, false"),
        ({"scales": "best"}, r"scales: is 'best', must be one of absmax, sweep, four-over-six"),
        ({"activation": "8-bit"}, r"activation: is '8-bit', must be one of per-token, 16-bit"),
        ({"ignore": "lm_head"}, r"ignore: is 'lm_head', must be a list of layer names"),
        ({"ignore": ["a", "re:["]}, r"nvfp4_tc\.ignore: 're:\[' is no regular expression \(unterm"),
        ({"indexer_format": "int8"}, "indexer_format: is 'int8', must be one of nvfp4, mxfp4, fp8"),
        ({"experts": True}, "experts: is True, must be one of vllm, refuse"),
        (["fuse_mlp"], r"nvfp4_tc: is \['fuse_mlp'\], must be an object of options"),
    ],
)
def test_bad_option(given: object, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        Options.parse(given)


@pytest.mark.parametrize("name", ["nvfp4-tc", "NVFP4_TC"])
def test_options_under_a_name_that_is_nearly_theirs(name: str) -> None:
    given = SimpleNamespace(additional_config={name: {"scales": "sweep"}})
    with pytest.raises(InvalidOption, match=f"additional-config: has '{name}', must be 'nvfp4_tc'"):
        Options.of(given)


def test_what_is_of_others_is_left_alone() -> None:
    assert Options.of(SimpleNamespace(additional_config={"theirs": 1})) == Options()
    assert Options.of(SimpleNamespace(additional_config=None)) == Options()


def test_options_for_16_bit_checkpoints_alone() -> None:
    Options.parse({"fuse_mlp": False}).refuse_online_only()
    with pytest.raises(InvalidOption, match=r"nvfp4_tc\.scales: is set, but the checkpoint is qu"):
        Options.parse({"scales": "sweep", "fuse_mlp": False}).refuse_online_only()
