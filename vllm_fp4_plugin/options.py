"""Options of ``nvfp4-tc``, given as ``--additional-config '{"nvfp4_tc": {…}}'``.

vLLM hashes ``--additional-config`` into the key of its compile cache; a change of an environment
variable would not invalidate compiled graphs.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from nvfp4_kernels.formats.scale_search import SCALE_RULES, ScaleRule
from nvfp4_kernels.settings import MAX_TERMS
from vllm_fp4_plugin.ignore import InvalidPattern, check_pattern

METHOD = "nvfp4-tc"  # name of our method in vLLM
KEY = "nvfp4_tc"
SWITCHES = ("fuse_mlp", "fuse_norm", "fuse_attention", "norm_rope_kernels")
RENAMED = {"small_kernels": "norm_rope_kernels"}  # options renamed since earlier versions
_COMMON_WORDS = ("scales", "activation", "ignore", "experts")  # perhaps other plugins' options too
NORM_ROPE_KERNELS_OFF = "switched off (norm_rope_kernels)"

# Quantization of a linear layer's input: with its calibrated scale, with a scale per token, or
# none.
Activation = Literal["static", "per-token", "16-bit"]
RequestedActivation = Literal["per-token", "16-bit", "fp8"]
IndexerFormat = Literal["nvfp4", "mxfp4", "fp8", "bf16"]
ExpertsServer = Literal["auto", "own", "vllm"]
# One number for all layers, or pairs of pattern and number, in the user's order.
ActivationTerms = int | tuple[tuple[str, int], ...] | None


class InvalidOption(ValueError):
    """Error for an unknown option of ``nvfp4-tc``, or an invalid value of an option."""


@dataclass(frozen=True)
class Options:
    """Options set by the user.

    Attributes:
        fuse_mlp: whether to fuse gate_up and SiLU-and-mul where possible, and pass the result in
            NVFP4 if the next layer takes NVFP4.
        fuse_norm: whether a norm with a single consumer quantises for this consumer and, on several
            ranks, all-reduces the partial sums of the row-parallel layer before the norm.
        fuse_attention: whether attention quantises for its consumer, and normalises and rotates
            queries and keys where nothing else uses the normalised and rotated queries and keys.
        scales: rule for block scales when a 16-bit checkpoint is quantised at load.
        activation: activations of linear layers and experts. ``"per-token"``: as the checkpoint
            says, NVFP4 with one global scale per token in layers quantised at load. ``"16-bit"``:
            not quantised. ``"fp8"``: E4M3, with the calibrated scale or, without one, a scale per
            token. Unless FP8 is requested, a device without a kernel for NVFP4 activations uses 16
            bits; the report says so.
        ignore: layers of a 16-bit checkpoint that stay in 16 bits: names, ``*`` patterns or ``re:``
            regexes.
        norm_rope_kernels: whether to run rotary embeddings, and norms with a residual, on our
            kernels if the device has such kernels (Hopper): the next kernel can then start early
            (PDL).
        indexer_format: key format of sparse attention's indexer, under any quantization method;
            None: the model's format. See ``vllm_fp4_plugin.indexer``.
        experts: kernels for experts: ours or, if unsupported, vLLM's (``"auto"``); only ours
            (``"own"``); only vLLM's (``"vllm"``), in 16 bits for a 16-bit checkpoint. The report
            gives the choice and the reason.
        activation_terms: number of NVFP4 values, 1 to 4, summed for each activation of a linear
            layer or head (``nvfp4_kernels.formats.terms``): a number, or numbers by patterns as in
            ``ignore``, of which the first match wins. None, or no match: one term for NVFP4
            activations; 16-bit activations stay in 16 bits, or become three terms on a device
            without a kernel for them (Blackwell). With a number, 16-bit activations become NVFP4
            with a scale per token, unless the device has no kernel for NVFP4 activations (Hopper);
            the report gives the choice. A calibrated scale serves all terms. Each term repeats the
            GEMM's arithmetic, but reads no further weight bytes.
    """

    fuse_mlp: bool = True
    fuse_norm: bool = True
    fuse_attention: bool = True
    scales: ScaleRule = "absmax"
    activation: RequestedActivation = "per-token"
    ignore: tuple[str, ...] = ()
    norm_rope_kernels: bool = True
    indexer_format: IndexerFormat | None = None
    experts: ExpertsServer = "auto"
    activation_terms: ActivationTerms = None

    ONLINE_ONLY = ("scales", "ignore")

    @property
    def terms_patterns(self) -> list[str]:
        """Patterns of ``activation_terms``, in the user's order."""
        terms = self.activation_terms
        return [pattern for pattern, _ in terms] if isinstance(terms, tuple) else []

    @classmethod
    def of(cls, vllm_config: Any) -> "Options":
        """Read the options of an engine.

        Raises:
            InvalidOption: see ``parse``.
        """
        additional = vllm_config.additional_config
        if not isinstance(additional, dict):
            return cls()
        for name in additional:
            if name != KEY and name.lower().replace("-", "_") == KEY:
                raise InvalidOption(f"additional-config: has {name!r}, must be {KEY!r}; rename it")
        return cls.parse(additional.get(KEY, {}))

    @classmethod
    def parse(cls, requested: Any) -> "Options":
        """Read options from the ``nvfp4_tc`` entry of vLLM's additional config.

        Raises:
            InvalidOption: the message names the option, its value and accepted values.
        """
        if not isinstance(requested, Mapping):
            raise InvalidOption(f"{KEY}: is {requested!r}, must be an object of options")
        known = {f.name: f for f in fields(cls)}
        for name, value in requested.items():
            if name in RENAMED:
                raise InvalidOption(f"{KEY}.{name}: is now called {RENAMED[name]}; rename it")
            if name not in known:
                raise InvalidOption(f"{KEY}.{name}: is unknown, must be one of {', '.join(known)}")
            _check(name, value)
        values = dict(requested)
        if "ignore" in values:
            values["ignore"] = tuple(values["ignore"])
        if isinstance(values.get("activation_terms"), Mapping):
            values["activation_terms"] = tuple(values["activation_terms"].items())
        options = cls(**values)
        if options.activation == "fp8" and options.activation_terms is not None:
            raise InvalidOption(
                f"{KEY}.activation_terms: is {options.activation_terms!r}, must be left out with "
                "activation 'fp8', as terms are NVFP4; leave one of the two out"
            )
        return options

    def refuse_online_only(self) -> None:
        """Check that no option that only applies to 16-bit checkpoints is set.

        Raises:
            InvalidOption: the message names the first option with a value other than the default.
        """
        defaults = Options()
        for name in self.ONLINE_ONLY:
            if getattr(self, name) != getattr(defaults, name):
                raise InvalidOption(
                    f"{KEY}.{name}: is set, but the checkpoint is quantised already and is served "
                    "as it is; leave the option out, or serve the 16-bit checkpoint"
                )


def refuse_misplaced(additional_config: Any, is_ours: bool) -> None:
    """Check that no option of ours is placed outside of the ``nvfp4_tc`` entry.

    Args:
        additional_config: value of vLLM's ``--additional-config``.
        is_ours: whether ``nvfp4-tc`` is the method; if not, names that may be another plugin's
            options, such as ``scales``, are accepted.

    Raises:
        InvalidOption: the message names the option and the right place.
    """
    if not isinstance(additional_config, Mapping):
        return
    ours = {*(f.name for f in fields(Options)), *RENAMED}
    for name, value in additional_config.items():
        if name in ours and (is_ours or name not in _COMMON_WORDS):
            remedy = json.dumps({KEY: {RENAMED.get(name, name): value}}, default=repr)
            raise InvalidOption(
                f"additional-config: has {name!r} beside {KEY!r}, must be in it; give {remedy}"
            )


def _check(name: str, value: Any) -> None:
    accepted: tuple[Any, ...]
    if name == "ignore":
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise InvalidOption(f"{KEY}.ignore: is {value!r}, must be a list of layer names")
        _check_patterns(name, value)
        return
    if name == "activation_terms":
        _check_terms(value)
        return
    if name in SWITCHES:
        accepted = (True, False)
    elif name == "scales":
        accepted = SCALE_RULES
    elif name == "indexer_format":
        accepted = get_args(IndexerFormat)
    elif name == "experts":
        accepted = get_args(ExpertsServer)
    else:
        accepted = get_args(RequestedActivation)
    if value not in accepted or (name in SWITCHES and not isinstance(value, bool)):
        choices = ", ".join(str(a).lower() for a in accepted)
        raise InvalidOption(f"{KEY}.{name}: is {value!r}, must be one of {choices}")


def _check_patterns(name: str, patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            check_pattern(f"{KEY}.{name}", pattern)
        except InvalidPattern as error:
            raise InvalidOption(str(error)) from error


def _check_terms(value: Any) -> None:
    option, accepted = f"{KEY}.activation_terms", f"1 to {MAX_TERMS}"
    remedy = "give 3, which lose less than bfloat16 does, or leave the option out"
    if not isinstance(value, Mapping):
        if not _is_count(value):
            raise InvalidOption(
                f"{option}: is {value!r}, must be {accepted}, or an object from patterns of layers "
                f"to such numbers; {remedy}"
            )
        return
    for pattern, count in value.items():
        if not isinstance(pattern, str):
            raise InvalidOption(
                f"{option}: has the pattern {pattern!r}, must be a string; name a layer"
            )
        if not _is_count(count):
            raise InvalidOption(f"{option}: {pattern!r} is {count!r}, must be {accepted}; {remedy}")
    _check_patterns("activation_terms", value)


def _is_count(value: Any) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number and 1 <= value <= MAX_TERMS
