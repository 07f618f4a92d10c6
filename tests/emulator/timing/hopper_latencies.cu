// Latencies and intervals that parameters.py takes from an H200 (sm_90), in cycles.
//   nvcc -arch=sm_90a -O3 -o hopper_latencies hopper_latencies.cu && ./hopper_latencies
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>

#define TIMES4(x) x x x x
#define TIMES64(x) TIMES4(TIMES4(TIMES4(x)))

__device__ long long now() {
  long long t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}
__device__ uint32_t address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void wait(uint32_t barrier, int parity) {
  asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra W;}"
               ::"r"(barrier), "r"(parity) : "memory");
}
__device__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ void init(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;"
               ::"r"(barrier) : "memory");
}

// One warp, 1024 times an instruction that depends on itself; and 16 warps, 8 chains each.
#define INSTRUCTION(NAME, TYPE, KIND, TEXT)                                                        \
  __global__ void NAME##_chain(long long *out, TYPE *data) {                                       \
    TYPE x = data[5 + threadIdx.x % 7], y = data[0];                                               \
    long long start = now();                                                                       \
    for (int i = 0; i < 16; i++) { TIMES64(asm volatile(TEXT : "+" KIND(x) : KIND(y));) }          \
    long long end = now();                                                                         \
    if (threadIdx.x == 0) out[0] = end - start;                                                    \
    data[1] = x;                                                                                   \
  }                                                                                                \
  __global__ void NAME##_many(long long *out, TYPE *data) {                                        \
    TYPE x[8], y = data[3];                                                                        \
    for (int j = 0; j < 8; j++) x[j] = data[9 + j];                                                \
    __syncthreads();                                                                               \
    long long start = now();                                                                       \
    for (int i = 0; i < 256; i++) {                                                                \
      _Pragma("unroll") for (int j = 0; j < 8; j++) asm volatile(TEXT : "+" KIND(x[j]) : KIND(y)); \
    }                                                                                              \
    __syncthreads();                                                                               \
    long long end = now();                                                                         \
    if (threadIdx.x == 0) out[0] = end - start;                                                    \
    for (int j = 0; j < 8; j++) data[20 + j] = x[j];                                               \
  }
INSTRUCTION(fma, float, "f", "fma.rn.f32 %0, %0, %1, %1;")
INSTRUCTION(max, float, "f", "max.f32 %0, %0, %1;")
INSTRUCTION(ex2, float, "f", "ex2.approx.ftz.f32 %0, %0;")
INSTRUCTION(fma_f16x2, uint32_t, "r", "fma.rn.f16x2 %0, %0, %1, %1;")
INSTRUCTION(fma_f64, double, "d", "fma.rn.f64 %0, %0, %1, %1;")
INSTRUCTION(imad, int, "r", "mad.lo.s32 %0, %0, %1, %1;")
INSTRUCTION(shift, int, "r", "shf.l.wrap.b32 %0, %0, %0, %1;")
INSTRUCTION(popc, int, "r", "popc.b32 %0, %0;")
INSTRUCTION(shuffle, int, "r", "shfl.sync.bfly.b32 %0, %0, 1, 31, -1;")
INSTRUCTION(redux, int, "r", "redux.sync.add.s32 %0, %0, -1;")
INSTRUCTION(ballot, int, "r", "{.reg .pred p; setp.ne.s32 p, %0, %1; vote.sync.ballot.b32 %0, p, -1;}")
INSTRUCTION(cvt_f16x2, int, "r", "{.reg .f32 q; mov.b32 q, %0; cvt.rn.f16x2.f32 %0, q, q;}")
INSTRUCTION(cvt_e4m3x2, int, "r",
            "{.reg .f32 q; .reg .b16 h; mov.b32 q, %0; cvt.rn.satfinite.e4m3x2.f32 h, q, q; "
            "cvt.u32.u16 %0, h;}")

// One statement, 256 times.
#define STATEMENT(NAME, TEXT)                                                                      \
  __global__ void NAME(long long *out, int *) {                                                    \
    long long start = now();                                                                       \
    for (int i = 0; i < 4; i++) { TIMES64(asm volatile(TEXT ::: "memory");) }                      \
    long long end = now();                                                                         \
    if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = end - start;                                 \
  }
STATEMENT(bar_sync, "bar.sync 0;")
STATEMENT(proxy_fence, "fence.proxy.async.shared::cta;")
STATEMENT(device_fence, "fence.acq_rel.gpu;")
STATEMENT(cluster_relaxed, "barrier.cluster.arrive.relaxed; barrier.cluster.wait;")
STATEMENT(cluster_release, "barrier.cluster.arrive.release; barrier.cluster.wait;")

__global__ void loop_of_4_fma(long long *out, float *data, int count) {
  float x = data[5], y = data[6];
  long long start = now();
#pragma unroll 1
  for (int i = 0; i < count; i++)
    asm volatile("fma.rn.f32 %0, %0, %1, %1; fma.rn.f32 %0, %0, %1, %1; fma.rn.f32 %0, %0, %1, %1; "
                 "fma.rn.f32 %0, %0, %1, %1;" : "+f"(x) : "f"(y) : "memory");
  long long end = now();
  if (threadIdx.x == 0) out[0] = end - start;
  data[7] = x;
}

__global__ void shared_load(long long *out, int *data) {
  __shared__ int next[256];
  for (int i = threadIdx.x; i < 256; i += 32) next[i] = address(&next[(i * 7 + 32) % 256]);
  __syncthreads();
  uint32_t p = address(&next[threadIdx.x]);
  long long start = now();
  for (int i = 0; i < 16; i++) { TIMES64(asm volatile("ld.shared.b32 %0, [%0];" : "+r"(p)::"memory");) }
  long long end = now();
  if (threadIdx.x == 0) out[0] = end - start;
  data[1] = p;
}

__global__ void l2_load(long long *out, uint64_t *chain) {
  uint64_t p = chain[0];
  for (int i = 0; i < 64; i++) asm volatile("ld.global.cg.b64 %0, [%0];" : "+l"(p)::"memory");
  long long start = now();
  for (int i = 0; i < 256; i++) asm volatile("ld.global.cg.b64 %0, [%0];" : "+l"(p)::"memory");
  out[0] = now() - start;
  out[1] = p;
}

// Two warps, or the first warps of two CTAs, answer each other 256 times: 512 hops.
__global__ void hop(long long *out, int *) {
  __shared__ uint64_t barriers[2];
  uint32_t mine = address(barriers), other = mine + 8;
  if (threadIdx.x == 0) { init(mine); init(other); }
  __syncthreads();
  long long start = now();
  if (threadIdx.x % 32 == 0)
    for (int i = 0; i < 256; i++) {
      if (threadIdx.x == 0) { arrive(mine); wait(other, i & 1); }
      else { wait(mine, i & 1); arrive(other); }
    }
  long long end = now();
  if (threadIdx.x == 0) out[0] = end - start;
}
__global__ void __cluster_dims__(2, 1, 1) remote_hop(long long *out, int *) {
  __shared__ uint64_t barrier;
  uint32_t mine = address(&barrier), peer;
  if (threadIdx.x == 0) init(mine);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(mine), "r"(1 - blockIdx.x));
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
  long long start = now();
  if (threadIdx.x == 0)
    for (int i = 0; i < 256; i++) {
      if (blockIdx.x == 1) wait(mine, i & 1);
      asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer) : "memory");
      if (blockIdx.x == 0) wait(mine, i & 1);
    }
  long long end = now();
  if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = end - start;
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}

extern __shared__ __align__(128) char tile[];
__global__ void bulk_load(long long *out, char *data, int bytes) {
  __shared__ uint64_t barrier;
  uint32_t mine = address(&barrier);
  init(mine);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  long long start = now();
  for (int i = 0; i < 256; i++) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%2], [%3], %1, [%0];"
                 ::"r"(mine), "r"(bytes), "r"(address(tile)), "l"(data) : "memory");
    wait(mine, i & 1);
  }
  out[0] = now() - start;
}
__global__ void bulk_store(long long *out, char *data, int bytes) {
  long long start = now();
  for (int i = 0; i < 256; i++)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                 "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;"
                 ::"l"(data), "r"(address(tile)), "r"(bytes) : "memory");
  out[0] = now() - start;
}

static long long *out;
template <typename... P, typename... A>
void show(const char *name, double count, int ctas, int threads, void (*kernel)(long long *, P...), A... rest) {
  cudaLaunchConfig_t config = {};
  config.gridDim = ctas;
  config.blockDim = threads;
  config.dynamicSmemBytes = 32768;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {(unsigned)ctas, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  for (int i = 0; i < 3; i++) cudaLaunchKernelEx(&config, kernel, out, (P)rest...);
  cudaError_t error = cudaDeviceSynchronize();
  printf("%-24s %8.2f%s%s\n", name, out[0] / count, error ? " " : "", error ? cudaGetErrorString(error) : "");
}

int main() {
  float *data;
  uint64_t *chain, next[256];
  cudaMallocManaged(&out, 4096);
  cudaMallocManaged(&data, 4096);
  cudaMalloc(&chain, 1 << 20);
  for (int i = 0; i < 256; i++) data[i] = 0.37f * i + 0.1f;
  for (int i = 0; i < 256; i++) {
    next[0] = (uint64_t)chain + (i + 1) % 256 * 4096;
    cudaMemcpy((char *)chain + i * 4096, next, 8, cudaMemcpyHostToDevice);
  }
#define BOTH(NAME, TYPE)                                                                           \
  show(#NAME " latency", 1024, 1, 32, NAME##_chain, (TYPE *)data);                                 \
  show(#NAME " interval", 4 * 2048, 1, 512, NAME##_many, (TYPE *)data);
  show("fma latency", 1024, 1, 32, fma_chain, data);
  BOTH(max, float) BOTH(ex2, float) BOTH(fma_f16x2, uint32_t) BOTH(fma_f64, double)
  BOTH(imad, int) BOTH(shift, int) BOTH(popc, int) BOTH(redux, int)
  show("shuffle latency", 1024, 1, 32, shuffle_chain, (int *)data);
  BOTH(ballot, int) BOTH(cvt_f16x2, int) BOTH(cvt_e4m3x2, int)
  show("loop of 4 FMAs", 1000, 1, 32, loop_of_4_fma, data, 1000);
  show("shared load", 1024, 1, 32, shared_load, (int *)data);
  show("L2 load", 256, 1, 1, l2_load, chain);
  for (int threads : {32, 128, 512}) show("bar.sync", 256, 1, threads, bar_sync, (int *)data);
  show("fence.proxy.async", 256, 1, 32, proxy_fence, (int *)data);
  show("fence.acq_rel.gpu", 256, 1, 32, device_fence, (int *)data);
  for (int ctas : {1, 2, 4}) {
    show("cluster barrier relaxed", 256, ctas, 128, cluster_relaxed, (int *)data);
    show("cluster barrier release", 256, ctas, 128, cluster_release, (int *)data);
  }
  show("mbarrier hop", 512, 1, 64, hop, (int *)data);
  show("mbarrier remote hop", 512, 2, 32, remote_hop, (int *)data);
  for (int bytes : {128, 4096, 16384}) show("bulk load, L2", 256, 1, 1, bulk_load, (char *)chain, bytes);
  for (int bytes : {128, 16384, 32768}) show("bulk store", 256, 1, 1, bulk_store, (char *)chain, bytes);
}
