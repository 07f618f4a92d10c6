// Loads, stores, cp.async, prefetches and descriptor updates on an H200 (sm_90), for parameters.py.
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O3 -o hopper_memory hopper_memory.cu && ./hopper_memory
#include <cstdint>
#include <cstdio>
#include <cuda_runtime.h>

__device__ long long now() {
  long long t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}
__device__ uint32_t address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ uint4 load(const uint4 *p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Every thread has U loads of 16 bytes under way. Reads, writes or copies `count` elements.
template <int U, bool READ, bool WRITE>
__global__ void stream(const uint4 *in, uint4 *out, size_t count, int passes = 1) {
  size_t step = (size_t)gridDim.x * blockDim.x * U;
  uint4 sum = {};
  for (int pass = 0; pass < passes; pass++)
  for (size_t i = (size_t)blockIdx.x * blockDim.x * U + threadIdx.x; i < count; i += step) {
    uint4 v[U] = {};
    if (READ)
#pragma unroll
      for (int u = 0; u < U; u++) v[u] = load(in + i + u * blockDim.x);
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (WRITE) out[i + u * blockDim.x] = v[u];
      else { sum.x ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w; }
    }
  }
  if (!WRITE && sum.x == 0x12345) out[0] = sum;
}

extern __shared__ __align__(128) char tile[];
// The same with cp.async into shared memory, U groups under way.
template <int U> __global__ void stream_async(const uint4 *in, uint4 *out, size_t count) {
  size_t step = (size_t)gridDim.x * blockDim.x;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (int n = 0; i < count; i += step, n++) {
    uint32_t to = address(tile) + (n % U * blockDim.x + threadIdx.x) * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16; cp.async.commit_group; cp.async.wait_group %2;"
                 ::"r"(to), "l"(in + i), "n"(U - 1) : "memory");
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  if (tile[threadIdx.x] == 77) out[0] = in[0];
}

__global__ void chase(long long *result, uint64_t *chain, int count) {
  uint64_t p = chain[0];
  long long start = now();
  for (int i = 0; i < count; i++) asm volatile("ld.global.b64 %0, [%0];" : "+l"(p)::"memory");
  result[0] = now() - start;
  result[1] = p;
}
__global__ void async_latency(long long *result, char *data) {
  uint32_t to = address(tile) + threadIdx.x * 16;
  data += threadIdx.x * 16;
  long long start = now();
  for (int i = 0; i < 64; i++)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16; cp.async.wait_all;" ::"r"(to), "l"(data) : "memory");
  if (threadIdx.x == 0) result[0] = now() - start;
}
__global__ void async_arrive(long long *result, char *data) {
  uint32_t to = address(tile) + 1024 + threadIdx.x * 16, barrier = address(tile);
  data += threadIdx.x * 16;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 32;" ::"r"(barrier));
  __syncthreads();
  long long start = now();
  for (int i = 0; i < 64; i++)
    asm volatile("{.reg .pred p; cp.async.cg.shared.global [%0], [%1], 16;\n"
                 "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%2];\n"
                 "W: mbarrier.try_wait.parity.shared::cta.b64 p, [%2], %3; @!p bra W;}"
                 ::"r"(to), "l"(data), "r"(barrier), "r"(i & 1) : "memory");
  if (threadIdx.x == 0) result[0] = now() - start;
}
// All warps of one SM load over and over what L1 holds; lanes are `stride` bytes apart.
template <int W> __global__ void l1_rate(long long *result, char *data, int stride) {
  data += threadIdx.x % 32 * stride;
  uint32_t v[4] = {}, sum = 0;
  for (int pass = 0; pass < 2; pass++) {
    __syncthreads();
    long long start = now();
#pragma unroll 1
    for (int i = 0; i < 64; i++) {
      if (W == 16) asm volatile("ld.global.ca.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(data + i * 4096 % 16384));
      else asm volatile("ld.global.ca.b32 %0, [%1];" : "=r"(v[0]) : "l"(data + i * 4096 % 16384));
      sum ^= v[0] ^ v[3];
    }
    __syncthreads();
    if (threadIdx.x == 0) result[0] = now() - start;
  }
  if (sum == 0x12345) result[1] = sum;
}
#define STATEMENT(NAME, COUNT, TEXT)                                                               \
  __global__ void NAME(long long *result, char *data) {                                            \
    long long start = now();                                                                       \
    for (int i = 0; i < COUNT; i++) asm volatile(TEXT ::"l"(data + (i & 63) * 1024), "r"(address(tile)) : "memory"); \
    if (threadIdx.x == 0) result[0] = now() - start;                                               \
  }
STATEMENT(prefetch, 256, "prefetch.global.L2 [%0];")
STATEMENT(bulk_prefetch, 256, "cp.async.bulk.prefetch.L2.global [%0], 1024;")
STATEMENT(replace_shared, 256, "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%1], %0;")
STATEMENT(replace_global, 256, "tensormap.replace.tile.global_address.global.b1024.b64 [%0], %0;")
STATEMENT(acquire_map, 256, "fence.proxy.tensormap::generic.acquire.gpu [%0], 128;")
STATEMENT(release_map, 256, "fence.proxy.tensormap::generic.release.gpu;")
STATEMENT(copy_map, 256, "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;")
__global__ void local_load(long long *result, char *data) {
  volatile int own[64];
  for (int i = 0; i < 64; i++) own[i] = (i * 7 + 3 + (int)data[0]) % 64;
  int at = threadIdx.x % 64;
  long long start = now();
  for (int i = 0; i < 256; i++) at = own[at];
  if (threadIdx.x == 0) result[0] = now() - start;
  result[1] = at;
}

// The same with stores; what is under way at the end is small beside 1024 of them.
template <int W> __global__ void store_rate(long long *result, char *data, int stride) {
  data += threadIdx.x / 32 * 65536 + threadIdx.x % 32 * stride;
  __syncthreads();
  long long start = now();
#pragma unroll 1
  for (int i = 0; i < 64; i++) {
    if (W == 16) asm volatile("st.global.v4.b32 [%0], {%1, %1, %1, %1};" ::"l"(data + i * 4096 % 16384), "r"(i) : "memory");
    else asm volatile("st.global.b32 [%0], %1;" ::"l"(data + i * 4096 % 16384), "r"(i) : "memory");
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) result[0] = now() - start;
}
// Stays for some cycles: what waves take longer is the way from one CTA to the next.
__global__ void stay(long long cycles) {
  long long start = now();
  while (now() - start < cycles) {}
}

static cudaEvent_t begin, finish;
template <typename F> double seconds(F launch) {
  float best = 1e9;
  for (int i = 0; i < 4; i++) {
    float ms;
    cudaEventRecord(begin); launch(); cudaEventRecord(finish); cudaEventSynchronize(finish);
    cudaEventElapsedTime(&ms, begin, finish);
    if (ms < best) best = ms;
  }
  cudaError_t error = cudaGetLastError();
  if (error) printf("ERROR %s\n", cudaGetErrorString(error));
  return best / 1e3;
}

int main() {
  cudaEventCreate(&begin); cudaEventCreate(&finish);
  cudaDeviceProp chip; cudaGetDeviceProperties(&chip, 0);
  int clock; cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, 0);
  int sms = chip.multiProcessorCount;
  printf("%s, %d SMs, %d kHz\n", chip.name, sms, clock);
  long long *result; uint4 *in, *out;
  size_t bytes = (size_t)4 << 30, count = bytes / 16;
  cudaMallocManaged(&result, 4096);
  cudaMalloc(&in, bytes); cudaMalloc(&out, bytes);
  cudaMemset(in, 0, bytes);
#define CYCLES(NAME, COUNT, THREADS, ...)                                                          \
  for (int i = 0; i < 3; i++) { __VA_ARGS__; cudaDeviceSynchronize(); }                            \
  printf("%-44s %9.2f cycles%s\n", NAME, result[0] / (double)(COUNT), cudaGetLastError() ? " ERROR" : "");
  cudaFuncSetAttribute(stream_async<4>, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
  uint64_t *chain = (uint64_t *)out;
  { // one hop per 2 MB page and line, through HBM the first time
    int hops = 1024; size_t stride = (2 << 20) + 256;
    for (int i = 0; i < hops; i++) {
      uint64_t next = (uint64_t)out + (size_t)((i + 1) % hops) * stride;
      cudaMemcpy((char *)out + (size_t)i * stride, &next, 8, cudaMemcpyHostToDevice);
    }
    cudaMemset(in, 0, bytes); chase<<<1, 1>>>(result, chain, hops); cudaDeviceSynchronize();
    printf("%-44s %9.2f cycles\n", "load, HBM, new page each", result[0] / (double)hops);
    for (int i = 0; i < 4096; i++) {
      uint64_t next = (uint64_t)out + (size_t)((i + 1) % 4096) * 4224;
      cudaMemcpy((char *)out + (size_t)i * 4224, &next, 8, cudaMemcpyHostToDevice);
    }
    cudaMemset(in, 0, bytes); chase<<<1, 1>>>(result, chain, 4000); cudaDeviceSynchronize();
    printf("%-44s %9.2f cycles\n", "load, HBM", result[0] / 4000.0);
    for (int i = 0; i < 64; i++) {
      uint64_t next = (uint64_t)out + (i + 1) % 64 * 128;
      cudaMemcpy((char *)out + i * 128, &next, 8, cudaMemcpyHostToDevice);
    }
    CYCLES("load, L1", 1024, 1, (chase<<<1, 1>>>(result, chain, 1024)))
  }
  CYCLES("local load", 256, 32, (local_load<<<1, 32>>>(result, (char *)in)))
  CYCLES("cp.async 512 bytes and wait, L2", 64, 32, (async_latency<<<1, 32, 4096>>>(result, (char *)in)))
  CYCLES("cp.async, mbarrier arrive and wait, L2", 64, 32, (async_arrive<<<1, 32, 4096>>>(result, (char *)in)))
  for (int stride : {4, 32, 64, 128, 256})  { printf("stride %d: ", stride);
    CYCLES("16 warps, 4-byte load, L1, per instruction", 64 * 16, 512, (l1_rate<4><<<1, 512>>>(result, (char *)in, stride))) }
  for (int stride : {16, 32, 64, 128, 256}) { printf("stride %d: ", stride);
    CYCLES("16 warps, 16-byte load, L1, per instruction", 64 * 16, 512, (l1_rate<16><<<1, 512>>>(result, (char *)in, stride))) }
  for (int stride : {4, 32, 64, 128, 2048}) { printf("stride %d: ", stride);
    CYCLES("16 warps, 4-byte store, per instruction", 64 * 16, 512, (store_rate<4><<<1, 512>>>(result, (char *)in, stride))) }
  for (int stride : {16, 32, 64, 128}) { printf("stride %d: ", stride);
    CYCLES("16 warps, 16-byte store, per instruction", 64 * 16, 512, (store_rate<16><<<1, 512>>>(result, (char *)in, stride))) }
  cudaFuncSetAttribute(stay, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10);
  for (int wave : {2000, 10000})
    for (int threads : {128, 256, 1024})
      for (int shared : {0, 200 << 10}) {
        int deep = shared ? 1 : 2048 / threads;
        double few = seconds([&] { stay<<<sms * deep * 10, threads, shared>>>(wave); });
        double many = seconds([&] { stay<<<sms * deep * 110, threads, shared>>>(wave); });
        printf("%5d cycles, CTAs of %4d threads, %6d bytes, %2d an SM: next after %7.1f cycles\n",
               wave, threads, shared, deep, (many - few) / 100 * clock * 1e3 - wave);
      }
#define ONE(NAME) CYCLES(#NAME, 256, 32, (NAME<<<1, 1, 1024>>>(result, (char *)in)))
  ONE(prefetch) ONE(bulk_prefetch) ONE(replace_shared) ONE(replace_global) ONE(acquire_map) ONE(release_map)
  CYCLES("copy_map", 256, 32, (copy_map<<<1, 32, 1024>>>(result, (char *)in)))

#define RATE(NAME, BYTES, SMS, ...) { double s = seconds([&] { __VA_ARGS__; });                    \
    printf("%-52s %8.1f GB/s %7.2f bytes/clk/SM\n", NAME, (BYTES) / s / 1e9, (BYTES) / s / (clock * 1e3) / (SMS)); }
  size_t small = (size_t)16 << 20, many = small / 16;
  for (int ctas : {1, 2, 8, 32, sms, 2 * sms}) {  // 16 MB stay in L2
    int on = ctas < sms ? ctas : sms, passes = ctas < 32 ? 2 : 64;
    printf("%d CTAs of 1024: ", ctas);
    RATE("read L2", (double)small * passes, on, (stream<4, true, false><<<ctas, 1024>>>(in, out, many, passes)))
    printf("%d CTAs of 1024: ", ctas);
    RATE("write L2", (double)small * passes, on, (stream<4, false, true><<<ctas, 1024>>>(in, out, many, passes)))
    printf("%d CTAs of 1024: ", ctas);
    RATE("cp.async L2", (double)small, on, (stream_async<4><<<ctas, 1024, 65536>>>(in, out, many)))
  }
  for (int threads : {32, 64, 128, 256, 512, 1024}) {
    printf("%d threads per SM: ", threads);
    RATE("read HBM, 1 load under way", (double)bytes, sms, (stream<1, true, false><<<sms, threads>>>(in, out, count)))
    printf("%d threads per SM: ", threads);
    RATE("read HBM, 4 loads under way", (double)bytes, sms, (stream<4, true, false><<<sms, threads>>>(in, out, count)))
  }
  RATE("read HBM, 2 x 1024 threads, 4 under way", (double)bytes, sms, (stream<4, true, false><<<2 * sms, 1024>>>(in, out, count)))
  RATE("read HBM, a load per thread, many CTAs of 256", (double)bytes, sms, (stream<1, true, false><<<count / 256, 256>>>(in, out, count)))
  RATE("read HBM, 4 loads per thread, many CTAs of 256", (double)bytes, sms, (stream<4, true, false><<<count / 1024, 256>>>(in, out, count)))
  RATE("cp.async HBM, 2 x 1024 threads, 4 under way", (double)bytes, sms, (stream_async<4><<<2 * sms, 1024, 65536>>>(in, out, count)))
  RATE("write HBM, 2 x 1024 threads", (double)bytes, sms, (stream<4, false, true><<<2 * sms, 1024>>>(in, out, count)))
  RATE("copy HBM, 2 x 1024 threads", 2.0 * bytes, sms, (stream<4, true, true><<<2 * sms, 1024>>>(in, out, count)))
  RATE("copy HBM, many CTAs of 256", 2.0 * bytes, sms, (stream<4, true, true><<<count / 1024, 256>>>(in, out, count)))
}
