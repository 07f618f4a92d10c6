"""NVIDIA's examples with their arguments: small problems of several tiles each."""

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

_KERNELS = "cute/blackwell/kernel/"
_HOPPER = "cute/hopper/kernel/"
_TUTORIALS = "cute/blackwell/tutorial/"
_PRIMITIVES = "experimental/primitives/"


@dataclass(frozen=True)
class Case:
    """One run of one example.

    Attributes:
        name: unique name.
        path: path under ``examples/python/CuTeDSL``.
        arguments: command line arguments.
        sms: number of streaming multiprocessors to emulate; a small number makes persistent kernels
            process several tiles per CTA.
        arch: "sm_100a" or "sm_90a".
    """

    name: str
    path: str
    arguments: str = ""
    sms: int = 148
    arch: str = "sm_100a"


def _dense() -> list[Case]:
    variants = {
        "fp16_1sm": "--ab_dtype Float16 --c_dtype Float16 --mma_tiler_mn 128,128",
        "bf16_2sm": "--ab_dtype BFloat16 --c_dtype BFloat16 --mma_tiler_mn 256,128 "
        "--cluster_shape_mn 2,1 --use_2cta_instrs --use_tma_store",
        "fp8_2sm": "--ab_dtype Float8E4M3FN --c_dtype Float32 --mma_tiler_mn 256,128 "
        "--cluster_shape_mn 2,2 --use_2cta_instrs --use_tma_store",
    }
    names = ("", "_persistent", "_software_pipeline", "_persistent_prefetch", "_persistent_dynamic")
    return [
        Case(
            f"dense_gemm{name}_{variant}",
            f"{_KERNELS}dense_gemm/dense_gemm{name}.py",
            f"--mnkl 512,512,256,1 {arguments}",
            sms=8,
        )
        for name in names
        for variant, arguments in variants.items()
    ]


def _blockscaled() -> list[Case]:
    formats = {
        "nvfp4": "Float4E2M1FN Float8E4M3FN 16",
        "mxfp4": "Float4E2M1FN Float8E8M0FNU 32",
        "mxf8": "Float8E4M3FN Float8E8M0FNU 32",
    }
    shapes = {
        "1sm": "--mma_tiler_mn 128,128 --cluster_shape_mn 1,1",
        "2sm": "--mma_tiler_mn 256,256 --cluster_shape_mn 2,1",
        "2x2": "--mma_tiler_mn 256,128 --cluster_shape_mn 2,2",
    }
    cases = []
    for kind, numbers in formats.items():
        ab, sf, vector = numbers.split()
        for shape, tiles in shapes.items():
            for name, prefix in (("", ""), ("_prefetch", "ab"), ("_amax", "ab")):
                if name and (kind, shape) not in (("nvfp4", "1sm"), ("mxf8", "2sm")):
                    continue
                types = f"--ab_dtype {ab}" if prefix else f"--a_dtype {ab} --b_dtype {ab}"
                size = "256,256,512,1" if name else "512,512,512,1"
                cases.append(
                    Case(
                        f"blockscaled_gemm{name}_{kind}_{shape}",
                        f"{_KERNELS}blockscaled_gemm/dense_blockscaled_gemm_persistent{name}.py",
                        f"{types} --sf_dtype {sf} --sf_vec_size {vector} --c_dtype BFloat16 "
                        f"--mnkl {size} {tiles}",
                        sms=8,
                    )
                )
    return cases


def _attention() -> list[Case]:
    folder = f"{_KERNELS}attention/"
    fmha, mixed = f"{folder}fmha/fmha.py", f"{folder}mixed_input_fmha/mixed_input_fmha_"
    shape = "--q_shape 1,256,2,128 --k_shape 1,256,1,128"
    backward = "--s_q 256 --s_k 256 --h_q 2 --h_k 2"
    mla = "--batch_size 2 --seq_len_k 512 --split_kv 2"
    halves = "--in_dtype Float16 --out_dtype Float16"
    return [
        Case("fmha_fp16", fmha, f"{halves} --q_shape 1,256,2,128 --k_shape 1,512,1,128"),
        Case("fmha_causal", fmha, f"{halves} --is_causal {shape}"),
        Case("fmha_fp8", fmha, f"--in_dtype Float8E4M3FN --out_dtype Float8E4M3FN {shape}"),
        Case("fmha_persistent", fmha, f"{halves} --is_persistent {shape}", sms=1),
        Case("fmha_bwd", f"{folder}fmha/fmha_bwd.py", backward),
        Case("fmha_bwd_causal", f"{folder}fmha/fmha_bwd.py", f"{backward} --is_causal"),
        Case("mla_decode_fp16", f"{folder}mla/mla_decode_fp16.py", mla),
        Case("mla_decode_fp8", f"{folder}mla/mla_decode_fp8.py", mla),
        Case(
            "mamba2_ssd",
            f"{folder}mamba2_ssd/mamba2_ssd.py",
            "--gbehcdln 1,2,1,2,4,64,128,128",
            sms=2,
        ),
        Case(
            "mixed_input_fmha_decode", f"{mixed}decode.py", "--seqlen 512 --heads_q 8 --heads_k 1"
        ),
        Case(
            "mixed_input_fmha_prefill_d256",
            f"{mixed}prefill_d256.py",
            "--q_shape 1,2,256,256 --k_shape 1,1,256,256",
        ),
        Case(
            "mixed_input_fmha_prefill_d512",
            f"{mixed}prefill_d512.py",
            "--q_shape 1,2,256,512 --k_shape 1,1,256,512",
        ),
    ]


def _grouped() -> list[Case]:
    problems = "--num_groups 2 --problem_sizes_mnkl '(256,256,256,1),(128,384,256,1)'"
    return [
        Case(
            "grouped_blockscaled_gemm_nvfp4",
            f"{_KERNELS}blockscaled_grouped_gemm/grouped_blockscaled_gemm.py",
            "--ab_dtype Float4E2M1FN --sf_dtype Float8E8M0FNU --sf_vec_size 16 --c_dtype Float16 "
            f"--mma_tiler_mn 128,128 --cluster_shape_mn 1,1 {problems}",
            sms=4,
        ),
        Case("grouped_gemm", f"{_KERNELS}grouped_gemm/grouped_gemm.py", problems, sms=4),
        Case("rmsnorm", f"{_KERNELS}rmsnorm/rmsnorm.py", "--M 16 --N 4096"),
        *(
            Case(f"moe_{name}", f"{_KERNELS}moe/{script}.py", f"--experts 4 {arguments}", sms=4)
            for name, script, arguments in (
                (
                    "grouped_mm",
                    "torch_grouped_mm",
                    "--tokens 128 --top_k_select 2 --hidden 256 --intermediate 256",
                ),
                (
                    "grouped_mm_2Dx2D",
                    "torch_grouped_mm",
                    "--tokens 128 --top_k_select 2 --hidden 256 --intermediate 256 "
                    "--scenario 2Dx2D --a_layout m_major",
                ),
                *(
                    (
                        f"scaled_grouped_mm_{kind}",
                        "torch_scaled_grouped_mm",
                        f"--kind {kind} --hidden 256 --intermediate 256",
                    )
                    for kind in ("mxfp8", "mxfp4", "nvfp4")
                ),
            )
        ),
        *(
            Case(name, f"{_KERNELS}blockwise_gemm/{name}.py", f"--mnkl {shape}", sms=4)
            for name, shape in (
                ("blockwise_gemm", "256,256,512,1"),
                ("contiguous_grouped_gemm", "256,256,512,4"),
                ("masked_grouped_gemm", "256,256,512,4"),
            )
        ),
    ]


def _mixed_input() -> list[Case]:
    modes = {
        "int8_convert": "--a_dtype Int8 --scale_granularity_m 0 --scale_granularity_k 0 "
        "--mma_tiler_mnk 128,128,64",
        "uint8_convert": "--a_dtype Uint8 --scale_granularity_m 0 --scale_granularity_k 0 "
        "--b_dtype Float16 --c_dtype Float16 --a_major k",
        "int4_scale": "--a_dtype Int4 --scale_granularity_m 1 --scale_granularity_k 128",
        "int4_scale_2sm": "--a_dtype Int4 --scale_granularity_m 1 --scale_granularity_k 256 "
        "--mma_tiler_mnk 256,128,128 --cluster_shape_mn 2,1 --use_2cta_instrs",
    }
    scripts = {
        "": ("mixed_input_gemm", tuple(modes)),
        "_grouped": ("grouped_mixed_input_gemm", tuple(modes)),
        "_grouped_acc_scale": (
            "grouped_mixed_input_gemm_acc_scale",
            ("int4_scale", "int4_scale_2sm"),
        ),
    }
    return [
        Case(
            f"mixed_input_gemm{name}_{mode}",
            f"{_KERNELS}mixed_input_gemm/{script}.py",
            f"{modes[mode]} --mnkl 256,256,512,{3 if name else 1}",
            sms=4,
        )
        for name, (script, chosen) in scripts.items()
        for mode in chosen
    ]


def _epilogues() -> list[Case]:
    efc = "cute/blackwell/efc/"
    shape = "--mnkl 256,256,256,1"
    pair = "--mma_tiler_mn 256,128 --cluster_shape_mn 2,1 --use_2cta_instrs"
    alpha_beta = f"{_KERNELS}dense_gemm/dense_gemm_alpha_beta_persistent.py"
    return [
        Case("dense_gemm_alpha_beta_tf32", alpha_beta, shape, sms=2),
        Case(
            "dense_gemm_alpha_beta_fp16_2sm",
            alpha_beta,
            f"{shape} --ab_dtype Float16 --c_dtype Float16 --d_dtype Float16 {pair}",
            sms=2,
        ),
        Case("custom_epilogue", f"{efc}custom_epilogue_dense_gemm.py", shape, sms=2),
        Case(
            "custom_epilogue_bf16_2sm",
            f"{efc}custom_epilogue_dense_gemm.py",
            f"{shape} --ab_dtype BFloat16 {pair}",
            sms=2,
        ),
        Case(
            "synthetic_custom_epilogue",
            f"{efc}synthetic_custom_epilogue_dense_gemm.py",
            f"{shape} --read_tensors 2 --written_tensors 2",
            sms=2,
        ),
        *(
            Case(
                f"activation_epilogue_{activation}",
                f"{efc}activation_custom_epilogue_dense_gemm.py",
                f"{shape} --activation {activation}",
                sms=2,
            )
            for activation in ("relu", "gelu", "silu", "tanh")
        ),
    ]


def _generic() -> list[Case]:
    """Examples for every GPU, or for Ampere or Hopper with instructions that Blackwell supports."""
    ampere, quick = "cute/ampere/kernel/", "--warmup_iterations 0 --iterations 1"
    return [
        Case(
            "elementwise_add", f"{ampere}elementwise/elementwise_add.py", f"--M 256 --N 512 {quick}"
        ),
        *(
            Case(
                f"elementwise_apply_{op}",
                f"{ampere}elementwise/elementwise_apply.py",
                f"--M 256 --N 256 --op {op} {quick}",
            )
            for op in ("add", "mul")
        ),
        Case("ampere_sgemm", f"{ampere}dense_gemm/sgemm.py", f"--mnk 128,256,64 {quick}"),
        Case(
            "ampere_tensorop_gemm",
            f"{ampere}dense_gemm/tensorop_gemm.py",
            f"--mnkl 128,256,128,1 {quick}",
        ),
        Case(
            "ampere_flash_attention_v2",
            f"{ampere}attention/flash_attention_v2.py",
            f"--batch_size 1 --seqlen_q 256 --seqlen_k 256 --num_head 1 {quick}",
        ),
        Case(
            "ampere_hstu_attention",
            f"{ampere}attention/hstu_attention.py",
            "--batch_size 1 --seqlen_q 128 --seqlen_kv 128 --num_head 2",
        ),
        Case("cute_ext_memcpy", "cute_ext/ampere/memcpy_simt_universal_copy.py"),
        *(
            Case(name.split("/")[-1], f"dsl_tutorials/{name}.py", arguments)
            for name, arguments in {
                "cooperative_launch": "",
                "dynamic_smem_size": "",
                "fp16_gemm_4_iket": "--mnk 512,512,256",
                "inline_ptx": "",
                "launch_completion_and_programmatic_events": "--n-blocks 8",
                "programmatic_dependent_launch": "--use_pdl",
                "smem_allocator": "",
                "dataclass_immutable": "",
                "tvm_ffi/jit_and_use_in_torch": "",
            }.items()
        ),
        Case("fp4_x2_tensor", "cute/tvm_ffi/fp4_x2_tensor.py"),
        Case(
            "hopper_cta_norm", "cute/hopper/kernel/cta_norm/cta_norm.py", f"--M 64 --N 2048 {quick}"
        ),
    ]


def _extended() -> list[Case]:
    folder = "cute_ext/blackwell/"
    return [
        Case("cute_ext_block_scaled_gemm", f"{folder}dense_block_scaled_gemm.py"),
        Case("cute_ext_dense_gemm", f"{folder}dense_gemm.py"),
        Case("cute_ext_dense_gemm_2sm", f"{folder}dense_gemm_2sm.py"),
        Case("cute_ext_dense_gemm_cute_pipeline", f"{folder}dense_gemm_cute_pipeline.py"),
        Case("cute_ext_dense_gemm_ptr_array", f"{folder}dense_gemm_ptr_array.py"),
    ]


def _task_scheduling() -> list[Case]:
    folder = "experimental/task_scheduling/blackwell/tutorial/"
    scripts = (
        "01_copy_basics_ts/02_copy_tma",
        "02_gemm_simple_ts/01_fp16_bf16_gemm_3",
        "03_persistent_scheduling_dynamic_domain_ts/01_copy_persistent_skip_tile",
        "03_persistent_scheduling_dynamic_domain_ts/02_copy_varlen_dynamic_domain",
        "06_gemm_split_k_fp16_ts/01_gemm_split_k_fp16",
    )
    return [
        Case(f"tasks_{script.split('/')[1][3:]}", f"{folder}{script}.py", sms=4)
        for script in scripts
    ]


def _tutorials() -> list[Case]:
    gemms = [f"fp16_gemm_{n}" for n in ("0", "1", "2", "3", "3_1", "4", "5", "6")]
    return [
        *(
            Case(name, f"{_TUTORIALS}tutorial_gemm/{name}.py", "--mnk 512,512,256", sms=4)
            for name in gemms
        ),
        *(
            Case(name, f"{_TUTORIALS}tutorial_gemm/{name}.py", "--mnkl 256,256,512,1", sms=4)
            for name in ("nvfp4_gemm_0", "nvfp4_gemm_1")
        ),
        *(
            Case(f"tutorial_{name}", f"{_TUTORIALS}tutorial_tma/{name}.py")
            for name in ("tma_v0", "tma_v1", "tma_v2")
        ),
    ]


def _primitives() -> list[Case]:
    names = {
        "": "async_pipeline bar_warp_sync barrier_cta_red barrier_cta_sync basic_types "
        "cp_async_bulk cp_async_bulk_prefetch cp_async_mbarrier_arrive_cluster "
        "cp_async_mbarrier_arrive_cta cp_async_shared_global cp_async_shared_global_swizzled "
        "elect_sync ldmatrix_stmatrix mapa mbarrier mbarrier_lifecycle pipeline_software_fill red "
        "redux_sync shfl_sync vote_sync warp_named_barrier",
        "reduction/": "block_smem_reduce cluster_smem_reduce cluster_tmem_reduce "
        "thread_vector_reduce warp_vector_reduce",
        "tcgen05/": "1cta_mma_a_from_tmem 1cta_mma_basic 1cta_mma_mn_major 1cta_mma_pipeline "
        "2cta_mma_basic 2cta_mma_blockscale_m128 2cta_mma_tma_store clusterMxN_2cta_mma "
        "cp_narrow_a_to_tmem_mma mcast_clusterMxN_1cta_mma mcast_clusterMxN_2cta_mma "
        "slicek_m32n8k128 tmem_ld_st tmem_ld_to_stmatrix_transpose",
        "tma/": "tma_1cta_mbarrier tma_load_store tma_load_to_ldmatrix tma_multicast "
        "tma_pipeline_count2 tma_pipeline_pingpong tma_pipeline_single_warp "
        "tma_pipeline_warpspec tma_store tma_swizzle_modes tma_tensormap_replace",
        "tutorial/": "01_hello_world 04_tma_load 05_minimal_tensor_mma 06_softmax "
        "07_vectorized_array 08_mlir_value_tree_debug 09_tma_4d_to_2d "
        "10_minimal_tensor_mma_fp8 gemm_M128_N128_Kany_TN_warpspec_multistage",
    }
    return [
        Case(f"primitives_{name}", f"{_PRIMITIVES}{folder}{name}.py")
        for folder, listed in names.items()
        for name in listed.split()
    ]


def _hopper() -> list[Case]:
    gemm, fp16 = f"{_HOPPER}dense_gemm/dense_gemm", "--a_dtype Float16 --b_dtype Float16"
    shape = "--mnkl 512,512,256,1 --tile_shape_mn 128,128"
    grouped = "--num_groups 2 --problem_sizes_mnkl '(256,128,128,1),(128,256,192,1)'"
    heads = "--mma_tile_shape_mn 64,128 --q_shape 1,256,2,64 --k_shape 1,256,2,64"
    runs = {
        "dense_gemm_fp16": (f"{gemm}.py", f"{shape} {fp16} --cluster_shape_mn 2,1"),
        "dense_gemm_fp16_turned": (f"{gemm}.py", f"{shape} {fp16} --a_major m --b_major n"),
        "dense_gemm_persistent_fp16": (f"{gemm}_persistent.py", f"{shape} {fp16}"),
        "grouped_gemm_fp16": (f"{_HOPPER}grouped_gemm/grouped_gemm.py", grouped),
        "fmha": (f"{_HOPPER}attention/fmha.py", heads),
        "fmha_causal": (f"{_HOPPER}attention/fmha.py", f"{heads} --is_causal --is_persistent"),
    }
    return [
        Case(f"hopper_{name}", path, arguments, sms=4, arch="sm_90a")
        for name, (path, arguments) in runs.items()
    ]


CASES = (
    *_dense(),
    *_blockscaled(),
    *_attention(),
    *_grouped(),
    *_mixed_input(),
    *_epilogues(),
    *_tutorials(),
    *_extended(),
    *_task_scheduling(),
    *_generic(),
    *_primitives(),
    *_hopper(),
)


_TASKS = "experimental/task_scheduling/blackwell/tutorial/"
# Patterns of excluded examples, with the reasons.
EXCLUDED = {
    "cute/hopper/kernel/dense_gemm/dense_gemm_fp8_*": "wgmma of FP8, which is not modelled",
    "cute/blackwell_geforce/*": "sm_120",
    "*/sm103_*": "sm_103",
    "cute/blackwell/kernel/distributed/*": "several GPUs, multimem",
    "dsl_tutorials/jax/*": "JAX on a GPU",
    "*_in_jax.py": "JAX on a GPU",
    "dsl_tutorials/ffi/*": "builds a C++ extension with CMake",
    "dsl_tutorials/export/*": "exports object files; test_runtime_shim.py launches one",
    "dsl_tutorials/tvm_ffi/aot_*": "exports object files; test_runtime_shim.py launches one",
    "dsl_tutorials/tvm_ffi/ampere_gemm_with_fake_tensor.py": "compares with cuBLAS to the bit",
    "dsl_tutorials/call_bypass_dlpack.py": "compares with cuBLAS to the bit",
    "dsl_tutorials/call_from_jit.py": "compares with cuBLAS to the bit",
    "dsl_tutorials/print_latex.py": "launches nothing",
    "dsl_tutorials/torch_fake_tensor.py": "launches nothing",
    "dsl_tutorials/tvm_ffi/compile_with_fake_tensor.py": "launches nothing",
    "dsl_tutorials/tvm_ffi/error_reporting.py": "ends in the error that it shows",
    "cute/ampere/tutorial/elementwise_add_autotune.py": "chooses by measured time",
    "experimental/primitives/tutorial/02_naive_gemm.py": "1024 cubed without tensor cores: hours",
    "experimental/primitives/tutorial/03_gemm_tiled_smem.py": "1024 cubed without tensor cores",
    f"{_TASKS}01_*/01_copy_grid_stride.py": "copies 2**24 elements twice: minutes",
    f"{_TASKS}04_*/0*.py": "CuTe DSL 4.8.0 refuses it, the checkout asks for 4.7.0",
    f"{_TASKS}05_*/0*.py": "CuTe DSL 4.8.0 refuses it, the checkout asks for 4.7.0",
    f"{_TASKS}07_*/0*.py": "CuTe DSL refuses it, 4.7.0 and 4.8.0 alike",
    f"{_TASKS}*/bench_*.py": "measures time",
    "cute/blackwell/kernel/reduce/reduce.py": "a part of rmsnorm",
    "cute/blackwell/kernel/moe/moe_*.py": "a part of other examples",
    "*/efc/common_*.py": "a part of other examples",
    "*/mamba2_ssd_*.py": "a part of other examples",
    "*/mixed_input_host_utils.py": "a part of other examples",
    "*helpers*": "a part of other examples",
    "*utils*": "a part of other examples",
    "*/__init__.py": "a part of other examples",
}


def unlisted(cutlass: Path) -> list[str]:
    """Examples of a checkout that are neither listed as a case nor excluded."""
    folder = cutlass / "examples/python/CuTeDSL"
    scripts = {str(script.relative_to(folder)) for script in folder.rglob("*.py")}
    return sorted(
        script
        for script in scripts - {case.path for case in CASES}
        if not any(fnmatch(script, pattern) for pattern in EXCLUDED)
    )
