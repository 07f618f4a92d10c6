// What one launch over many layers' weights could win on sm_90: the loop of one token that loads,
// decodes and multiplies, and the hop of a flag from all CTAs to all while they load. No product.
// The figures are in examples/results/hopper_kernels.md.
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -o hopper_persistent hopper_persistent.cu
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <vector>

#ifndef WARPS_OF_A_CTA
#define WARPS_OF_A_CTA 16
#endif
constexpr int WARPS = WARPS_OF_A_CTA;  // that decode: each has 1 KB of a stage
constexpr int STAGE = 1024 * WARPS, STAGES = 192 / WARPS, LAYERS = 8, PRODUCTS = 4;
// NVFP4 bytes of a Llama 8B's qkv, o, gate and up, down: 0.5625 for each weight.
constexpr double BYTES[PRODUCTS] = {6144. * 4096 * .5625, 4096. * 4096 * .5625, 28672. * 4096 * .5625,
                                    4096. * 14336 * .5625};

struct Plan {
  int stages[PRODUCTS];  // of a CTA
  size_t layer;          // bytes of a layer, all CTAs
  size_t wrap;           // bytes after which weights begin anew
  int window;            // stages that are on their way at once, of those of the ring
};

__device__ uint32_t address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void wait(uint32_t barrier, int parity) {
  asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra L; }"
               ::"r"(barrier), "r"(parity) : "memory");
}
__device__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Two E2M1 codes, in the low nibbles of both halves, to half2 over 2^14.
__device__ uint32_t decode(uint32_t w, int shift) {
  uint32_t c = w >> shift;
  return (c & 0x00080008u) << 12 | (c & 0x00070007u) << 9;
}
__device__ uint32_t scaled(uint32_t a, uint32_t scale) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(scale));
  return d;
}
__device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

__device__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory"); }

extern __shared__ __align__(1024) char memory[];

// LOADS: the ring is filled; DECODES: it is multiplied, else only let go; HOPS: of a layer.
template <bool LOADS, bool DECODES, int HOPS>
__global__ void __launch_bounds__(32 * (WARPS + 1))
    persistent(const char *weights, Plan plan, uint32_t *counter, half *token, float *out, uint32_t base) {
  __shared__ __align__(8) uint64_t full[STAGES], empty[STAGES];
  half *x = (half *)(memory + STAGE * STAGES);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(full + s)));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(empty + s)), "n"(WARPS));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp == WARPS) {
    if (!LOADS || lane) return;
    uint32_t count = 0;
    for (int layer = 0; layer < LAYERS; layer++) {
      size_t at = layer * plan.layer;
      for (int p = 0; p < PRODUCTS; p++) {
        for (int n = 0; n < plan.stages[p]; n++, count++) {
          int s = count % STAGES;
          wait(address(empty + s), (count / STAGES + 1) & 1);
          // Else a flag waits behind all that the ring has asked for.
          if (count >= plan.window && plan.window < STAGES) {
            uint32_t before = count - plan.window;
            wait(address(full + before % STAGES), before / STAGES & 1);
          }
          asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(full + s)), "n"(STAGE) : "memory");
          const char *from = weights + (at + ((size_t)n * gridDim.x + blockIdx.x) * STAGE) % plan.wrap;
          asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                       ::"r"(address(memory + s * STAGE)), "l"(from), "n"(STAGE), "r"(address(full + s)) : "memory");
        }
        at += (size_t)plan.stages[p] * gridDim.x * STAGE;
      }
    }
    return;
  }
  float first[4] = {}, second[4] = {};
  uint32_t count = 0, hop = base;
  for (int layer = 0; layer < LAYERS; layer++) {
    for (int p = 0; p < PRODUCTS; p++) {
      if (LOADS)
        for (int n = 0; n < plan.stages[p]; n++, count++) {
          int s = count % STAGES;
          wait(address(full + s), count / STAGES & 1);
          if (!DECODES) {
            __syncwarp();
            if (lane == 0) arrive(address(empty + s));
            continue;
          }
          const uint4 *data = (const uint4 *)(memory + s * STAGE) + warp * 64 + lane;
          uint4 v[2] = {data[0], data[32]};
          __syncwarp();
          if (lane == 0) arrive(address(empty + s));
          const uint2 *b = (const uint2 *)x + (n * STAGE / 8192 + warp / 8) % 28 * 128 + lane;
          uint32_t scale = 0x3c003c00u + count;
#pragma unroll
          for (int i = 0; i < 4; i++) {
            uint2 own = b[i * 32];
#pragma unroll
            for (int r = 0; r < 2; r++) {
              uint32_t w = i == 0 ? v[r].x : i == 1 ? v[r].y : i == 2 ? v[r].z : v[r].w;
              uint32_t a[4];
#pragma unroll
              for (int k = 0; k < 4; k++) a[k] = scaled(decode(w, 4 * k), scale);
              multiply(r == 0 ? first : second, a, own);
            }
          }
        }
      // After each product, and once more before o_proj, for attention.
      for (int each = 0; each < (HOPS == 0 ? 0 : HOPS == 5 && p == 0 ? 2 : 1); each++) {
        if (threadIdx.x < 32) token[(blockIdx.x * 32 + threadIdx.x) % 14336] = __float2half(first[0] * 1e-6f);
        consumers_sync();
        hop += gridDim.x;
        if (threadIdx.x == 0) {
          asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
          uint32_t seen;
          do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
          while ((int)(seen - hop) < 0);
        }
        consumers_sync();
        for (int i = threadIdx.x; i < (p == 2 ? 14336 : 4096) / 8; i += 32 * WARPS) {  // of the next product
          uint4 v;
          asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                       : "l"((const uint4 *)token + i) : "memory");
          ((uint4 *)x)[i] = v;
        }
        consumers_sync();
      }
    }
  }
  if (first[0] + second[1] == 12345.f) out[threadIdx.x] = first[0];
}

static uint32_t base = 0;

template <bool LOADS, bool DECODES, int HOPS>
double measure(const char *name, const char *weights, Plan plan, uint32_t *counter, half *token, float *out, int sms) {
  auto kernel = persistent<LOADS, DECODES, HOPS>;
  size_t shared = STAGE * STAGES + 2 * 14336;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
  cudaEvent_t t0, t1;
  cudaEventCreate(&t0), cudaEventCreate(&t1);
  std::vector<double> times;
  for (int n = 0; n < 21; n++) {
    cudaEventRecord(t0);
    kernel<<<sms, 32 * (WARPS + 1), shared>>>(weights, plan, counter, token, out, base);
    cudaEventRecord(t1);
    cudaError_t error = cudaEventSynchronize(t1);
    if (error != cudaSuccess) { printf("%s: %s\n", name, cudaGetErrorString(error)); exit(1); }
    base += (uint32_t)sms * HOPS * LAYERS;
    float ms;
    cudaEventElapsedTime(&ms, t0, t1);
    times.push_back(ms * 1e3 / LAYERS);
  }
  std::sort(times.begin(), times.end());
  double us = times[times.size() / 2];
  printf("%-58s %7.2f us a layer (%.2f to %.2f)", name, us, times.front(), times[times.size() * 9 / 10]);
  if (LOADS) printf(", %5.1f KB per us and SM, %.2f TB/s", plan.layer / us / sms / 1e3, plan.layer / us / 1e6);
  printf("\n");
  return us;
}

int main() {
  cudaDeviceProp device;
  cudaGetDeviceProperties(&device, 0);
  int sms = device.multiProcessorCount;
  Plan plan = {};
  plan.window = STAGES;
  for (int p = 0; p < PRODUCTS; p++) {
    plan.stages[p] = (int)(BYTES[p] / STAGE / sms + .5);
    plan.layer += (size_t)plan.stages[p] * sms * STAGE;
  }
  plan.wrap = plan.layer * LAYERS;
  char *weights;
  uint32_t *counter;
  half *token;
  float *out;
  cudaMalloc(&weights, plan.wrap), cudaMemset(weights, 0x21, plan.wrap);
  cudaMalloc(&counter, 4), cudaMemset(counter, 0, 4);
  cudaMalloc(&token, 2 * 14336), cudaMemset(token, 0, 2 * 14336);
  cudaMalloc(&out, 4096);
  printf("%s, %d SMs, %.1f MB a layer, %d layers in a launch, %d warps\n", device.name, sms, plan.layer / 1e6, LAYERS, WARPS);
  double hops = measure<false, false, 4>("4 hops", weights, plan, counter, token, out, sms);
  double more = measure<false, false, 5>("5 hops", weights, plan, counter, token, out, sms);
  printf("a hop without loads: %.2f us\n", (more + hops) / 9);
  for (int window = 2; window <= STAGES; window = window < 4 ? window + 1 : window + 2) {
    plan.window = window;
    printf("%d KB on their way\n", window * STAGE / 1024);
    measure<true, false, 0>("load", weights, plan, counter, token, out, sms);
    measure<true, false, 5>("load, 5 hops", weights, plan, counter, token, out, sms);
    measure<true, true, 0>("load, decode, multiply", weights, plan, counter, token, out, sms);
    measure<true, true, 5>("load, decode, multiply, 5 hops", weights, plan, counter, token, out, sms);
  }
  Plan cached = plan;
  cached.wrap = (size_t)sms * STAGE * 8;  // stays in L2
  measure<true, false, 0>("load from L2", weights, cached, counter, token, out, sms);
  measure<true, true, 0>("load from L2, decode, multiply", weights, cached, counter, token, out, sms);
  return 0;
}
