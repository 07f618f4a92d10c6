"""``python -m vllm_fp4_plugin report``: the table, without loading any weight."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.activation import GeluAndMul
from vllm.model_executor.models import llama

from tests import terminal, tiny_llama
from tests.catalogue import checkpoint, facts
from tests.engine import report_command as report
from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.checkpoint import weight_account
from vllm_fp4_plugin.checkpoint.weight_account import KINDS
from vllm_fp4_plugin.commands import command_line
from vllm_fp4_plugin.commands.model_report import model_report
from vllm_fp4_plugin.engine import meta_model
from vllm_fp4_plugin.formats import UnsupportedCheckpoint

pytestmark = pytest.mark.slow


def test_table(modelopt: Path) -> None:
    done = report(
        modelopt, "--every-layer", "--additional-config", '{"nvfp4_tc":{"fuse_mlp":false}}'
    )
    assert done.exit_code == 0, done.stderr
    text = " ".join(done.stdout.replace("│", " ").split())
    assert "model.layers.1.self_attn.qkv_proj" in done.stdout
    assert text.count("W4A4 static") == 8  # 2 layers of 4 projections
    assert text.count("switched") == 2
    assert (
        text.count("nvfp4_paged_attention_fp8_kv/reference (cpu) fp8_e4m3 KV cache by default") == 2
    )
    assert "bytes per weight" in text


@pytest.mark.parametrize("how", [[], ["--by-headers"]], ids=["built", "by headers"])
def test_the_weights_of_each_kind_add_up_to_the_files(how: list[str], modelopt: Path) -> None:
    done = report(modelopt, *how)
    assert done.exit_code == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("│")] for line in done.stdout.splitlines()]
    held = {row[1]: row for row in rows if len(row) > 2 and row[1] in (*KINDS, "all")}
    assert list(held) == ["linear layers", "head", "embeddings", "norms", "all"]
    column = 2 if how else 4
    sizes = {kind: int(row[column].replace(",", "")) for kind, row in held.items()}
    whole = sizes.pop("all")
    tensors = load_file(modelopt / "model.safetensors")
    assert sum(sizes.values()) == whole == sum(tensor.nbytes for tensor in tensors.values())
    norms = [tensor for name, tensor in tensors.items() if "norm" in name]
    assert sizes["norms"] == sum(tensor.nbytes for tensor in norms)
    assert sizes["head"] == tensors["lm_head.weight"].nbytes
    assert held["head"][-2] == "lm_head"
    file = (modelopt / "model.safetensors").stat().st_size
    said = f"files: {file:,} bytes, {whole:,} of tensors and {file - whole:,} of headers"
    assert said in done.stdout


@pytest.mark.parametrize(
    "how", [[], ["--every-layer", "--arch", "sm_100"], ["--by-headers"]], ids=" ".join
)
def test_json_tells_what_the_text_tells(how: list[str], modelopt: Path) -> None:
    text, done = report(modelopt, *how), report(modelopt, *how, "--json")
    assert text.exit_code == done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"] == str(modelopt)
    where = f" for {found['arch']}" if found["arch"] else ""
    assert text.stdout.startswith(f"nvfp4-tc on {modelopt}{where}\n")
    drawn = [line.split("│")[1:-1] for line in text.stdout.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in row] for row in drawn]
    layers = [[str(cell) for cell in layer.values()] for layer in found["layers"]]
    assert [*found["layers"][0]] == ["layer", "count", "kernel", "arithmetic", "why"]
    assert rows[: len(layers)] == layers
    accounts = [account for account in found["weights"].values() if account is not None]
    for kind, *cells, modules in rows[len(layers) : -1]:
        parts = [account[kind] for account in accounts]
        sizes = [(f"{part['bytes']:,}", f"{part['bytes_per_weight']:.4f}") for part in parts]
        assert cells == [cell for size in sizes for cell in size]
        names = parts[0]["modules"].items()
        assert modules == ", ".join(name if n == 1 else f"{name} ×{n}" for name, n in names)
    kinds = {kind for account in accounts for kind in account}
    assert {row[0] for row in rows[len(layers) : -1]} == kinds
    files = found["files"]
    said = f"files: {files['bytes']:,} bytes, {files['tensor_bytes']:,} of tensors and "
    assert f"{said}{files['header_bytes']:,} of headers" in text.stdout
    assert all(note in done.stderr and note in text.stderr for note in found["notes"])
    assert bool(found["notes"]) == ("--by-headers" in how)


TIED = "bfloat16 weights of model.embed_tokens (tie_word_embeddings)"


def test_a_tied_head_is_the_embeddings_weights(tmp_path: Path) -> None:
    tied = tiny_llama.save(tmp_path, tie_word_embeddings=True)
    text, done = report(tied), report(tied, "--json")
    assert text.exit_code == done.exit_code == 0, done.stderr
    assert TIED in text.stdout
    found = json.loads(done.stdout)
    [head] = [row for row in found["layers"] if row["layer"] == "lm_head"]
    assert [*head.values()] == ["lm_head", 1, "unquantized (vLLM)", "16-bit", TIED]
    assert "head" not in found["weights"]["in_memory"]  # counted once, with the embeddings


def test_an_embedding_that_a_model_multiplies_by_is_a_tied_head(tmp_path: Path) -> None:
    """Gemma 2's class has no module of a head."""
    sizes = tiny_llama.config(tie_word_embeddings=True).to_dict()
    sizes |= {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    rows = [r for r in model_report(str(tmp_path)).layers if r.name == "lm_head"]
    assert [row.reason for row in rows] == [TIED]


def test_a_head_in_16_bits_has_weights_of_its_own(modelopt: Path) -> None:
    found = json.loads(report(modelopt, "--json").stdout)
    [head] = [row for row in found["layers"] if row["layer"] == "lm_head"]
    assert head["why"] == "bfloat16 weights of its own"
    assert found["weights"]["in_memory"]["head"]["modules"] == {"lm_head": 1}


def test_a_refusal_leaves_no_document(bf16: Path) -> None:
    done = report(bf16, "--by-headers", "--json")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "holds no quantization_config" in done.stderr


def test_a_narrow_terminal_and_a_pipe(modelopt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of layers and kernels stay whole; a pipe has no width, whatever ``COLUMNS`` is."""
    monkeypatch.setenv("COLUMNS", "40")
    piped = report(modelopt, "--every-layer").stdout
    monkeypatch.setenv("COLUMNS", "300")
    assert report(modelopt, "--every-layer").stdout == piped
    terminal.narrow(monkeypatch)
    narrow = report(modelopt, "--every-layer").stdout
    terminal.check_no_word_is_broken(piped, narrow)
    assert "model.layers.1.self_attn.qkv_proj" in terminal.words(narrow)


def test_weights_quantised_at_load_take_less_than_the_files(bf16: Path) -> None:
    planned = model_report(str(bf16))
    files = weight_account.of_files(checkpoint_files.read_headers(bf16))
    assert planned.weights is not None
    here, there = planned.weights.parts, files.parts
    assert here["linear layers"].nbytes == sum(layer.weight_bytes for layer in planned.layers)
    assert here["linear layers"].elements == there["linear layers"].elements
    assert there["linear layers"].bytes_per_weight == 2
    assert here["linear layers"].bytes_per_weight < 0.57
    for kind in ("head", "embeddings", "norms"):
        assert (here[kind].nbytes, here[kind].names) == (there[kind].nbytes, there[kind].names)


def test_what_the_complete_model_keeps_from_fusing(
    modelopt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, "SiluAndMul", GeluAndMul)
    done = report(modelopt)
    assert done.exit_code == 0, done.stderr
    reason = "not fused: LlamaMLP.act_fn is GeluAndMul, not our SiluAndMul"
    assert reason in " ".join(done.stdout.replace("│", " ").split())


def test_refusal_is_one_line_and_a_status(bf16: Path) -> None:
    done = report(bf16, "--additional-config", '{"nvfp4_tc":{"fuse":false}}')
    assert done.exit_code == 1
    assert "\nerror: nvfp4_tc.fuse: is unknown, must be one of fuse_mlp, " in "\n" + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_brackets_are_shown_as_they_are(bf16: Path) -> None:
    """Brackets in a regex, in vLLM's message and in an unused pattern are not markup."""
    patterns = ["re:.*[qkv]_proj", "re:.*[/o]_proj", "q_prj"]
    done = report(bf16, "--additional-config", json.dumps({"nvfp4_tc": {"ignore": patterns}}))
    assert done.exit_code == 0, done.stderr
    assert "ignored by 're:.*[qkv]_proj'" in done.stdout
    assert "ignored by 're:.*[/o]_proj'" in done.stdout
    assert "nvfp4_tc.ignore: 'q_prj' covers no layer of this process" in done.stderr
    assert done.stderr.count("covers no layer") == 1
    refused = report(bf16, "--dtype", "float32")
    assert refused.exit_code == 1
    [line] = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert "Supported dtypes: [torch.bfloat16, torch.float16]" in line  # on a line of its own there


def test_a_config_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    done = report(tmp_path)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'config.json'}: is [], must be an object; ")
    assert "Traceback" not in done.stdout + done.stderr


def test_what_vllm_stumbles_over(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as end, command_line.refusals("m"):
        raise AttributeError("no head")
    assert end.value.exit_code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: m: vLLM cannot build it here (AttributeError: no head), must")


def test_additional_config_must_be_json(bf16: Path) -> None:
    done = report(bf16, "--additional-config", "{nvfp4_tc}")
    assert done.exit_code == 1
    assert "additional-config: is no JSON" in done.stderr


def test_another_device(modelopt: Path, weight_only: Path) -> None:
    """Kernels of sm_100 are planned without a GPU; 16-bit activations become NVFP4 terms."""
    done = report(modelopt, "--arch", "sm_100")
    assert done.exit_code == 0, done.stderr
    assert "for sm_100" in done.stdout
    assert "nvfp4_silu_mul_gemm/block_scaled (sm_100)" in done.stdout
    assert "nvfp4_paged_attention_fp8_kv/FmhaSm100 (sm_100)" in done.stdout
    for how in ([], ["--by-headers"]):
        done = report(weight_only, "--arch", "sm_100a", *how)
        assert done.exit_code == 0, done.stderr
        text = " ".join(done.stdout.replace("│", " ").split())
        assert "W4A4×3 per-token" in text
        assert "W4A16 kernel; 3 terms lose less" in text
        assert "nvfp4_gemm/block_scaled" in text
    terms = '{"nvfp4_tc": {"activation_terms": {"q_proj": 2, "k_proj": 2, "v_proj": 2}}}'
    for how in ([], ["--by-headers"]):
        done = report(weight_only, "--arch", "cpu", "--additional-config", terms, *how)
        text = " ".join(done.stdout.replace("│", " ").split())
        assert "W4A4×2 per-token" in text
        assert "activation_terms of 'q_proj'" in text
    unknown = report(modelopt, "--arch", "sm_101")
    assert unknown.exit_code == 1
    assert "--arch: is 'sm_101', must be one of cpu, sm_90 or sm_90a (H100" in unknown.stderr


def test_hopper_has_flash_attention(tmp_path: Path) -> None:
    family = facts.named("Qwen 3 (dense), compressed-tensors")
    done = report(checkpoint.write(family, tmp_path), "--arch", "sm_90")
    assert "prefill FlashAttention 3 (vLLM)" in " ".join(done.stdout.replace("│", " ").split())


def test_attention_of_vllm_has_no_name_of_this_machine(bf16: Path) -> None:
    """A GPU's backend is not named: only that GPU tells vLLM's choice."""
    done = report(bf16, "--arch", "sm_100", "--attention-backend", "CPU_ATTN")
    assert "of vLLM's choice" in done.stdout
    assert "CPU_ATTN (vLLM)" not in done.stdout


def test_what_this_cpu_lacks_refuses_no_plan_for_a_gpu(
    tmp_path: Path, cpu_without_fp8_cache: str
) -> None:
    """The plans come first: a backend that one of them chose is not kept for this CPU's report."""
    model = checkpoint.write(facts.named("Gemma 4 (dense, vision)"), tmp_path)
    for arch in ("sm_90", "sm_100"):
        done = report(model, "--arch", arch)
        assert done.exit_code == 0, done.stderr
        text = " ".join(done.stdout.replace("│", " ").split())
        assert "of vLLM's choice fp8_e4m3 KV cache" in text
    for how in ([], ["--arch", "cpu"]):
        done = report(model, *how)
        assert done.exit_code == 1
        assert done.stderr.splitlines()[-1] == f"error: {cpu_without_fp8_cache}"


def test_a_plan_for_a_gpu_keeps_prefix_caching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLA without AMX has none in vLLM, which then refuses hybrid models."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    model = checkpoint.write(facts.named("Kimi K2 Thinking (MLA, experts)"), tmp_path)
    for arch in ("sm_100", "cpu"):
        with meta_model.built(str(model), arch=arch) as (_, config):
            assert config.cache_config.enable_prefix_caching == (arch == "sm_100")


def test_by_headers(modelopt: Path, bf16: Path) -> None:
    """The kernels are the same, module by module, without vLLM's model."""
    done = report(modelopt, "--by-headers", "--every-layer", "--arch", "sm_100")
    assert done.exit_code == 0, done.stderr
    text = " ".join(done.stdout.replace("│", " ").split())
    layers = 2 * 7
    assert text.count("nvfp4_gemm/block_scaled (sm_100) W4A4 static") == layers
    assert "model.layers.1.self_attn.q_proj" in text
    assert "by the tensors' headers alone" in done.stderr
    refused = report(bf16, "--by-headers")
    assert refused.exit_code == 1
    assert "holds no quantization_config" in refused.stderr


@pytest.mark.parametrize(
    ("dtype", "refused"),
    [
        (torch.float8_e8m0fnu, ""),  # as the scales of DeepSeek V4's own experts
        (torch.complex64, "model.layers.0.w1.scale: dtype is C64, must be one of BOOL"),
    ],
    ids=["E8M0", "complex"],
)
def test_by_headers_with_a_tensor_of_another_dtype(
    dtype: torch.dtype, refused: str, modelopt: Path, tmp_path: Path
) -> None:
    shutil.copytree(modelopt, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    scale = torch.ones(4, 4).to(dtype)
    save_file(load_file(file) | {"model.layers.0.w1.scale": scale}, file, metadata={"format": "pt"})
    done = report(tmp_path / "model", "--by-headers")
    assert done.exit_code == int(bool(refused)), done.stderr
    assert refused in done.stderr


@pytest.mark.parametrize(
    ("error", "arch", "has_remedy"),
    [
        (NotImplementedError, "", True),
        (ValueError, "sm_100", True),
        (ValueError, "cpu", False),
        (ValueError, "", False),
        (UnsupportedCheckpoint, "sm_100", False),
    ],
)
def test_what_this_machine_cannot_build(
    error: type[Exception],
    arch: str,
    has_remedy: bool,
    modelopt: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The remedy is for errors of vLLM: the plugin's own hold for the planned device."""

    def unsupported(*_: object, **__: object) -> None:
        raise error("sparse attention")

    monkeypatch.setattr(llama.LlamaForCausalLM, "__init__", unsupported)
    done = report(modelopt, *(["--arch", arch] if arch else []))
    assert done.exit_code == 1
    remedied = "cannot build it on this machine (sparse attention); plan it with --by-headers"
    assert (remedied in done.stderr) == has_remedy
    assert has_remedy or done.stderr.splitlines()[-1] == "error: sparse attention"
