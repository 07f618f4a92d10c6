"""NVIDIA's examples and the arguments to run them with: small, but of several tiles."""

from dataclasses import dataclass

_KERNELS = "cute/blackwell/kernel/"
_TUTORIALS = "cute/blackwell/tutorial/"
_PRIMITIVES = "experimental/primitives/"


@dataclass(frozen=True)
class Case:
    """One run of one example.

    Attributes:
        name: unique.
        path: under ``examples/python/CuTeDSL``.
        arguments: of its command line.
        sms: streaming multiprocessors to emulate; few make persistent kernels take several tiles.
    """

    name: str
    path: str
    arguments: str = ""
    sms: int = 148


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
                cases.append(
                    Case(
                        f"blockscaled_gemm{name}_{kind}_{shape}",
                        f"{_KERNELS}blockscaled_gemm/dense_blockscaled_gemm_persistent{name}.py",
                        f"{types} --sf_dtype {sf} --sf_vec_size {vector} --c_dtype BFloat16 "
                        f"--mnkl 512,512,512,1 {tiles}",
                        sms=8,
                    )
                )
    return cases


def _attention() -> list[Case]:
    fmha = f"{_KERNELS}attention/fmha/fmha.py"
    shape = "--q_shape 1,512,2,128 --k_shape 1,512,1,128"
    return [
        Case("fmha_fp16", fmha, f"--in_dtype Float16 --out_dtype Float16 {shape}"),
        Case("fmha_causal", fmha, f"--in_dtype Float16 --out_dtype Float16 --is_causal {shape}"),
        Case("fmha_fp8", fmha, f"--in_dtype Float8E4M3FN --out_dtype Float8E4M3FN {shape}"),
        Case(
            "fmha_persistent",
            fmha,
            f"--in_dtype Float16 --out_dtype Float16 --is_persistent {shape}",
            sms=2,
        ),
        Case(
            "fmha_bwd",
            f"{_KERNELS}attention/fmha/fmha_bwd.py",
            "--s_q 256 --s_k 256 --h_q 2 --h_k 2",
        ),
        Case(
            "mla_decode_fp16",
            f"{_KERNELS}attention/mla/mla_decode_fp16.py",
            "--batch_size 2 --seq_len_k 512 --split_kv 2",
        ),
        Case(
            "mla_decode_fp8",
            f"{_KERNELS}attention/mla/mla_decode_fp8.py",
            "--batch_size 2 --seq_len_k 512 --split_kv 2",
        ),
        Case(
            "mamba2_ssd",
            f"{_KERNELS}attention/mamba2_ssd/mamba2_ssd.py",
            "--gbehcdln 1,2,1,2,4,64,128,128",
            sms=2,
        ),
        Case(
            "mixed_input_fmha_decode",
            f"{_KERNELS}attention/mixed_input_fmha/mixed_input_fmha_decode.py",
            "--seqlen 512 --heads_q 8 --heads_k 1",
        ),
    ]


def _others() -> list[Case]:
    grouped = f"{_KERNELS}blockscaled_grouped_gemm/grouped_blockscaled_gemm.py"
    problems = "--num_groups 2 --problem_sizes_mnkl '(256,256,256,1),(128,384,256,1)'"
    return [
        Case(
            "grouped_blockscaled_gemm_nvfp4",
            grouped,
            "--ab_dtype Float4E2M1FN --sf_dtype Float8E8M0FNU --sf_vec_size 16 --c_dtype Float16 "
            f"--mma_tiler_mn 128,128 --cluster_shape_mn 1,1 {problems}",
            sms=4,
        ),
        Case("grouped_gemm", f"{_KERNELS}grouped_gemm/grouped_gemm.py", problems, sms=4),
        Case("mixed_input_gemm", f"{_KERNELS}mixed_input_gemm/mixed_input_gemm.py"),
        Case("blockwise_gemm", f"{_KERNELS}blockwise_gemm/blockwise_gemm.py"),
        Case("contiguous_grouped_gemm", f"{_KERNELS}blockwise_gemm/contiguous_grouped_gemm.py"),
        Case("masked_grouped_gemm", f"{_KERNELS}blockwise_gemm/masked_grouped_gemm.py"),
        Case("rmsnorm", f"{_KERNELS}rmsnorm/rmsnorm.py", "--M 16 --N 4096"),
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
        "tutorial/": "01_hello_world 02_naive_gemm 03_gemm_tiled_smem 04_tma_load "
        "05_minimal_tensor_mma 06_softmax 07_vectorized_array 09_tma_4d_to_2d "
        "10_minimal_tensor_mma_fp8 gemm_M128_N128_Kany_TN_warpspec_multistage",
    }
    return [
        Case(f"primitives_{name}", f"{_PRIMITIVES}{folder}{name}.py")
        for folder, listed in names.items()
        for name in listed.split()
    ]


CASES = (
    *_dense(),
    *_blockscaled(),
    *_attention(),
    *_others(),
    *_tutorials(),
    *_primitives(),
)
