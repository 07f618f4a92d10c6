"""Faults that a checkpoint of one safetensors file may have."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
DTYPES = {
    torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.uint8: torch.float16,
    torch.float8_e4m3fn: torch.uint8,
}  # fmt: skip

Change = Callable[[Tensor], Tensor | None]
Meaning = Literal["none", "the same", "another"]


@dataclass(frozen=True)
class Fault:
    """One fault of a checkpoint.

    Attributes:
        kind: kind of fault, such as ``"NaN"``.
        where: tensor, file or config field that is damaged.
        make: function that damages a copy of the checkpoint.
        meaning: whether the damaged checkpoint has a valid meaning: none, so that it must be
            refused; that of the sound checkpoint; or another meaning, which is served.
    """

    kind: str
    where: str
    make: Callable[[Path], None]
    meaning: Meaning = "none"

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.where}"


def faults(folder: Path) -> Iterator[Fault]:
    """Yield all faults that can be applied to a sound checkpoint."""
    yield from file_faults(folder)
    with safe_open(folder / WEIGHTS, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
            yield from tensor_faults(name, tensors.get_tensor(name))
    yield from config_faults(json.loads((folder / CONFIG).read_text()))


# --- tensors --------------------------------------------------------------------------------------


def tensor_faults(name: str, x: Tensor) -> Iterator[Fault]:
    """Yield the faults of one tensor."""
    is_kv_scale = name.endswith((".k_scale", ".v_scale"))  # 1 where there is none

    def fault(
        kind: str, change: Callable[[Tensor], Tensor | None], harmless: bool = False
    ) -> Fault:
        return Fault(kind, name, lambda folder: _change(folder, name, change), harmless)

    yield fault("missing", lambda x: None, is_kv_scale)
    yield fault("of another dtype", lambda x: x.to(DTYPES[x.dtype]))
    if x.ndim:
        yield fault("a row short", lambda x: x[:-1].contiguous())
        yield fault("a column short", lambda x: x[..., :-1].contiguous())
        yield fault("empty", lambda x: x[:0].contiguous())
    yield fault("of one dimension more", lambda x: x[None].repeat(2, *[1] * x.ndim))
    is_scale = x.dtype is torch.float8_e4m3fn or (x.dtype is torch.float32 and x.ndim < 2)
    if x.dtype is not torch.uint8:
        yield fault("NaN", lambda x: _with(x, math.nan))
    if x.dtype not in (torch.uint8, torch.float8_e4m3fn):
        yield fault("infinite", lambda x: _with(x, math.inf))
    if is_scale:
        yield fault("negative", lambda x: _with(x, -1.0))
        # A block of zeros may have any scale.
        yield fault("zero", lambda x: _with(x, 0.0))
    extra = f"{name}_extra"
    yield Fault(
        "without a parameter", extra, lambda folder: _change(folder, extra, lambda _: x.clone())
    )


def _with(x: Tensor, value: float) -> Tensor:
    changed = x.float().contiguous()
    changed.view(-1)[-1] = value
    return changed.to(x.dtype)


def _change(folder: Path, name: str, change: Change) -> None:
    tensors = load_file(folder / WEIGHTS)
    changed = change(tensors.get(name, torch.empty(0)))
    if changed is None:
        del tensors[name]
    else:
        tensors[name] = changed
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


# --- files ----------------------------------------------------------------------------------------


def file_faults(folder: Path) -> Iterator[Fault]:
    """Yield the faults of files."""
    size = (folder / WEIGHTS).stat().st_size
    for kept in (0, 4, 200, size // 2, size - 1):
        yield Fault("truncated", f"{WEIGHTS}, {kept} of {size} bytes", _truncating(WEIGHTS, kept))
    yield Fault("absent", WEIGHTS, lambda f: (f / WEIGHTS).unlink())
    yield Fault("a folder", WEIGHTS, _folder_instead)
    yield Fault("pickled", WEIGHTS, _pickle)
    yield Fault("garbage", WEIGHTS, lambda f: (f / WEIGHTS).write_bytes(b"\xff" * size))
    for name, index in {
        "names a file that is not there": {"weight_map": {"a": "absent.safetensors"}},
        "names a tensor that is not there": {"weight_map": {"a": WEIGHTS}},
        "names a file elsewhere": {"weight_map": {"a": f"../{WEIGHTS}"}},
        "has no map": {},
        "is a list": [],
    }.items():
        yield Fault(name, INDEX, _writing(INDEX, json.dumps(index)))
    yield Fault("is no JSON", INDEX, _writing(INDEX, "{"))
    for text in ("", "{", "[]", "null", '"a"'):
        yield Fault(f"is {text or 'empty'}", CONFIG, _writing(CONFIG, text))
    yield Fault("absent", CONFIG, lambda f: (f / CONFIG).unlink())


def _truncating(name: str, kept: int) -> Callable[[Path], None]:
    def truncate(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.truncate(kept)

    return truncate


def _writing(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


def _folder_instead(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def _pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


# --- config ---------------------------------------------------------------------------------------

# Fields of a Llama's config that the sizes of tensors, or results, depend on.
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "head_dim"),
)


def config_faults(config: dict[str, Any]) -> Iterator[Fault]:
    """Yield the faults of the fields of ``config.json``."""
    for field in SIZES:
        value = config[field]
        for wrong in (value + 1, value * 2, 0, -1, "many", None, [value]):
            derived = field == "head_dim" and not wrong
            yield _field((field,), wrong, "the same" if derived else "none")
    # The model's type also determines the architecture.
    for wrong in ([], None):
        yield _field(("architectures",), wrong, "the same")
    yield _field(("architectures",), ["NoSuchModel"])
    yield _field(("model_type",), "no_such_model")
    yield from _quantization_faults(("quantization_config",), config["quantization_config"])


def _quantization_faults(path: tuple[str, ...], config: dict[str, Any]) -> Iterator[Fault]:
    for name, value in config.items():
        here = (*path, name)
        if isinstance(value, dict):
            yield from _quantization_faults(here, value)
        for wrong in _wrong(value):
            meaning = UNREAD.get(name, "none")
            if wrong is None:
                meaning = OPTIONAL.get(name, meaning)
            yield _field(here, wrong, meaning)
        yield _field(here, _ABSENT, OPTIONAL.get(name, UNREAD.get(name, "none")))


# Fields that are never read, and optional fields: others say the same, or a default applies.
# Without a scheme of activations a checkpoint is weight-only.
UNREAD: dict[str, Meaning] = dict.fromkeys(
    (
        *("producer", "version", "name", "global_compression_ratio", "observer", "actorder"),
        *("dynamic", "observer_kwargs", "block_structure", "scale_dtype", "zp_dtype"),
        *("quantization_status", "transform_config", "sparsity_config", "output_activations"),
        "format",  # of all, where a group has its own
    ),
    "the same",
)
OPTIONAL: dict[str, Meaning] = dict.fromkeys(
    (
        *("ignore", "targets", "symmetric", "strategy", "group_size", "config_groups", "group_0"),
        *("kv_cache_scheme", "kv_cache_quant_algo", "quant_method"),
    ),
    "the same",
) | {"input_activations": "another"}
_ABSENT = object()


def _wrong(value: Any) -> list[Any]:
    wrong: list[Any] = [17, "no_such_thing", [17], {"a": 1}, None]
    if isinstance(value, int) and not isinstance(value, bool):
        wrong += [2 * value, value + 1, 0, -1]
    return [each for each in wrong if type(each) is not type(value) or each != value]


def _field(path: tuple[str, ...], value: Any, meaning: Meaning = "none") -> Fault:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        at = config
        for name in path[:-1]:
            at = at[name]
        if value is _ABSENT:
            del at[path[-1]]
        else:
            at[path[-1]] = value
        (folder / CONFIG).write_text(json.dumps(config))

    kind = "absent" if value is _ABSENT else f"is {json.dumps(value)}"
    return Fault(kind, f"{CONFIG} {'.'.join(path)}", change, meaning)


def struck(fault: Fault, sound: Path, folder: Path) -> Path:
    """Copy a sound checkpoint and apply a fault to the copy."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    fault.make(folder)
    return folder
