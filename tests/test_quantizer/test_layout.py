"""Files: shards, index, and other files that are copied."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.test_quantizer.checkpoints import change_tensors, read_tensors
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

INDEX = "model.safetensors.index.json"


def test_one_file_has_no_index(sharded_llama: Path, tmp_path: Path):
    assert (sharded_llama / INDEX).exists()
    quantize_checkpoint(sharded_llama, tmp_path / "dst")

    assert [f.name for f in (tmp_path / "dst").glob("*safetensors*")] == ["model.safetensors"]
    with safe_open(tmp_path / "dst" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("max_shard_bytes", [1, 20_000, 45_000])
def test_shards(llama: Path, tmp_path: Path, max_shard_bytes: int):
    quantize_checkpoint(llama, tmp_path / "one")
    quantize_checkpoint(llama, tmp_path / "many", max_shard_bytes=max_shard_bytes)

    one, many = read_tensors(tmp_path / "one"), read_tensors(tmp_path / "many")
    assert one.keys() == many.keys()
    for name in one:
        assert torch.equal(one[name].float(), many[name].float())
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in one.values())
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    numbers = range(1, len(shards) + 1)
    assert [f.name for f in shards] == [
        f"model-{n:05}-of-{len(shards):05}.safetensors" for n in numbers
    ]
    found = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            names = list(file.keys())
            size = sum(file.get_tensor(name).nbytes for name in names)
        found |= dict.fromkeys(names, shard.name)
        assert size <= max_shard_bytes or len(names) == 1
    assert index["weight_map"] == found


def test_the_order_of_source_shards_does_not_matter(
    llama: Path, sharded_llama: Path, tmp_path: Path
):
    quantize_checkpoint(llama, tmp_path / "one", shared_fused_scale=True)
    quantize_checkpoint(sharded_llama, tmp_path / "many", shared_fused_scale=True)
    files = [tmp_path / d / "model.safetensors" for d in ("one", "many")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_other_types_are_copied_and_aligned(src: Path, tmp_path: Path):
    extra = {
        "model.layers.0.a_flag": torch.tensor([True, False, True]),
        "model.layers.0.a_table": torch.arange(5),
        "model.layers.0.nothing": torch.empty(0, 3, dtype=torch.float64),
        "model.layers.0.one": torch.tensor(2.5, dtype=torch.float64),
    }
    change_tensors(src, extra)
    quantize_checkpoint(src, tmp_path / "dst")

    after = read_tensors(tmp_path / "dst")
    for name, tensor in extra.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor)
    with (tmp_path / "dst" / "model.safetensors").open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    assert length % 8 == 0
    del header["__metadata__"]
    sizes = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1, "BOOL": 1}
    assert all(t["data_offsets"][0] % sizes[t["dtype"]] == 0 for t in header.values())


def test_companions_are_copied_and_old_weights_are_not(src: Path, tmp_path: Path):
    old = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors"]
    old += ["consolidated.safetensors.index.json", "original/consolidated.00.pth"]
    old += [".cache/part", INDEX]
    copied = ["README.md", "modeling.py", "original/config.json"]
    copied += ["additional_chat_templates/tools.jinja"]
    (src / "model.safetensors").rename(src / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(read_tensors(src), "model-00001-of-00001.safetensors")
    for name in [*old, *copied]:
        (src / name).parent.mkdir(exist_ok=True)
        (src / name).write_text(f"this is {name}")
    (src / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    quantize_checkpoint(src, tmp_path / "dst")

    dst = tmp_path / "dst"
    copied += ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    copied += ["chat_template.jinja"]
    written = ["config.json", "hf_quant_config.json", "model.safetensors"]
    files = {f.relative_to(dst).as_posix() for f in dst.rglob("*") if f.is_file()}
    assert files == {*copied, *written}
    for name in copied:
        assert (dst / name).read_bytes() == (src / name).read_bytes()
