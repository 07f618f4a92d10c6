"""Options under ``--additional-config``: accepted values, and refusals by name."""

import re
from types import SimpleNamespace

import pytest

from vllm_fp4_plugin.options import InvalidOption, Options, refuse_misplaced


def test_defaults() -> None:
    assert Options.parse({}) == Options(
        True, True, True, "absmax", "per-token", (), True, None, "auto", None
    )


def test_every_option_is_read() -> None:
    given = {
        "fuse_mlp": False,
        "fuse_norm": False,
        "fuse_attention": False,
        "scales": "sweep",
        "activation": "16-bit",
        "ignore": ["lm_head"],
        "norm_rope_kernels": False,
        "indexer_format": "nvfp4",
        "experts": "own",
        "activation_terms": {"*.down_proj": 3, "m": 1},
    }
    terms = (("*.down_proj", 3), ("m", 1))
    online = "sweep", "16-bit", ("lm_head",)
    expected = Options(False, False, False, *online, False, "nvfp4", "own", terms)
    assert Options.parse(given) == expected
    assert expected.terms_patterns == ["*.down_proj", "m"]


def test_terms_of_all_layers() -> None:
    for count in (1, 2, 3, 4):
        options = Options.parse({"activation_terms": count})
        assert options.activation_terms == count
        assert options.terms_patterns == []
        options.refuse_online_only()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fuse": True}, r"nvfp4_tc\.fuse: is unknown, must be one of fuse_mlp, fuse_norm, fuse_"),
        (
            {"small_kernels": False},
            r"nvfp4_tc\.small_kernels: is now called norm_rope_kernels; rename it",
        ),
        ({"fuse_mlp": "no"}, r"nvfp4_tc\.fuse_mlp: is 'no', must be one of true, false"),
        ({"fuse_mlp": 1}, r"nvfp4_tc\.fuse_mlp: is 1, must be one of true, false"),
        ({"norm_rope_kernels": 0}, r"norm_rope_kernels: is 0, must be one of true, false"),
        ({"scales": "best"}, r"scales: is 'best', must be one of absmax, sweep, four-over-six"),
        ({"activation": "8-bit"}, r"activation: is '8-bit', must be one of per-token, 16-bit, fp8"),
        (
            {"activation": "fp8", "activation_terms": 3},
            r"nvfp4_tc\.activation_terms: is 3, must be left out with activation 'fp8', as terms",
        ),
        ({"ignore": "lm_head"}, r"ignore: is 'lm_head', must be a list of layer names"),
        ({"ignore": ["a", "re:["]}, r"nvfp4_tc\.ignore: 're:\[' is no regular expression \(unterm"),
        ({"indexer_format": "int8"}, "indexer_format: is 'int8', must be one of nvfp4, mxfp4, fp8"),
        ({"experts": True}, "experts: is True, must be one of auto, own, vllm"),
        *(
            (
                {"activation_terms": value},
                rf"nvfp4_tc\.activation_terms: is {re.escape(repr(value))}, must be 1 to 4, or an "
                "object from patterns of layers to such numbers; give 3, which lose less than bfl",
            )
            for value in (0, 5, True, 2.0, "3", None, ["*"])
        ),
        *(
            (
                {"activation_terms": {"m": 3, "*.o_proj": value}},
                rf"activation_terms: '\*\.o_proj' is {value!r}, must be 1 to 4; give 3, which lose",
            )
            for value in (0, 5, False, "3", None)
        ),
        (
            {"activation_terms": {"re:(": 2}},
            r"nvfp4_tc\.activation_terms: 're:\(' is no regular expression \(missing \), .*must be",
        ),
        (
            {"activation_terms": {3: 2}},
            r"activation_terms: has the pattern 3, must be a string; name a layer",
        ),
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
    Options.parse({"fuse_mlp": False, "activation": "fp8"}).refuse_online_only()
    Options.parse({"activation": "16-bit"}).refuse_online_only()
    with pytest.raises(InvalidOption, match=r"nvfp4_tc\.scales: is set, but the checkpoint is qu"):
        Options.parse({"scales": "sweep", "fuse_mlp": False}).refuse_online_only()


@pytest.mark.parametrize(
    ("name", "value", "given"),
    [
        ("fuse_mlp", False, '{"fuse_mlp": false}'),
        ("activation_terms", {"*.o_proj": 2}, '{"activation_terms": {"*.o_proj": 2}}'),
        ("small_kernels", True, '{"norm_rope_kernels": true}'),
        ("ignore", ["lm_head"], '{"ignore": ["lm_head"]}'),
    ],
)
def test_options_beside_their_place(name: str, value: object, given: str) -> None:
    message = (
        f"^additional-config: has '{name}' beside 'nvfp4_tc', must be in it; give "
        + re.escape(f'{{"nvfp4_tc": {given}}}')
        + "$"
    )
    with pytest.raises(InvalidOption, match=message):
        refuse_misplaced({"nvfp4_tc": {}, name: value}, is_ours=True)


def test_words_that_others_use_pass_where_the_method_is_theirs() -> None:
    refuse_misplaced({"ignore": [], "scales": 3, "theirs": {"fuse_mlp": 1}}, is_ours=False)
    refuse_misplaced({"theirs": 1}, is_ours=True)
    refuse_misplaced(None, is_ours=True)
    with pytest.raises(InvalidOption, match="has 'indexer_format' beside"):
        refuse_misplaced({"ignore": [], "indexer_format": "fp8"}, is_ours=False)
