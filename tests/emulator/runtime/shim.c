/* Stands in for CuTe DSL's runtime library: every entry point becomes one call into Python.
 *
 * Integers and pointers travel as 64-bit words. Entry points listed under UNMODELLED exist so that
 * host code links; Python answers them with an error that names them.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define NOT_INITIALISED 3 /* cudaErrorInitializationError */
#define INVALID_CONFIGURATION 9 /* cudaErrorInvalidConfiguration */

typedef int32_t (*dispatcher)(const char *name, const uint64_t *arguments, int32_t count);
typedef void (*raise_parts)(const char *kind, const char **parts, int32_t count);
typedef void (*raise_text)(const char *kind, const char *message);

static dispatcher dispatch_to;
static char detail[65536];

EXPORT dispatcher emulator_set_dispatcher(dispatcher to) {
  dispatcher before = dispatch_to;
  dispatch_to = to;
  return before;
}

EXPORT void emulator_set_detail(const char *text) {
  snprintf(detail, sizeof detail, "%s", text);
}

static int32_t dispatch(const char *name, const uint64_t *arguments, int32_t count) {
  if (dispatch_to) return dispatch_to(name, arguments, count);
  fprintf(stderr, "emulator: %s called while no device is installed\n", name);
  return NOT_INITIALISED;
}

#define P(x) (uint64_t)(uintptr_t)(x)
#define I(x) (uint64_t)(uint32_t)(x)
#define L(x) (uint64_t)(x)
#define CALL(name, ...)                                          \
  {                                                              \
    const uint64_t words[] = {__VA_ARGS__};                      \
    return dispatch(name, words, sizeof words / sizeof *words);  \
  }
#define UNMODELLED(name) \
  EXPORT int32_t name(void) { return dispatch(#name, 0, 0); }

typedef void *ptr;
typedef int32_t i32;
typedef int64_t i64;

/* Libraries and kernels. */
#define LOAD(name)                                                                        \
  EXPORT i32 name(ptr library, ptr image, ptr a, ptr b, i32 c, ptr d, ptr e, i32 f)       \
  CALL(#name, P(library), P(image), P(a), P(b), I(c), P(d), P(e), I(f))
LOAD(_cudaLibraryLoadData)
LOAD(_cuLibraryLoadData)
EXPORT i32 _cudaLibraryUnload(ptr library) CALL("_cudaLibraryUnload", P(library))
EXPORT i32 _cuLibraryUnload(ptr library) CALL("_cuLibraryUnload", P(library))
EXPORT i32 _cudaLibraryGetKernel(ptr kernel, ptr library, ptr name)
    CALL("_cudaLibraryGetKernel", P(kernel), P(library), P(name))
EXPORT i32 _cuLibraryGetKernel(ptr kernel, ptr library, ptr name)
    CALL("_cuLibraryGetKernel", P(kernel), P(library), P(name))
EXPORT i32 _cudaLibraryGetKernelCount(ptr count, ptr library)
    CALL("_cudaLibraryGetKernelCount", P(count), P(library))
EXPORT i32 _cuKernelGetAttribute(ptr value, i32 attribute, ptr kernel, i32 device)
    CALL("_cuKernelGetAttribute", P(value), I(attribute), P(kernel), I(device))
EXPORT i32 _cudaFuncSetAttribute(ptr kernel, i32 attribute, i32 value)
    CALL("_cudaFuncSetAttribute", P(kernel), I(attribute), I(value))
EXPORT i32 _cudaKernelSetAttributeForDevice(ptr kernel, i32 attribute, i32 value, i32 device)
    CALL("_cudaKernelSetAttributeForDevice", P(kernel), I(attribute), I(value), I(device))
EXPORT i32 _cudaOccupancyMaxActiveBlocksPerMultiprocessor(ptr count, ptr kernel, i32 threads, i64 smem)
    CALL("_cudaOccupancyMaxActiveBlocksPerMultiprocessor", P(count), P(kernel), I(threads), L(smem))

/* Launches. */
EXPORT i32 _cudaLaunchKernelEx(ptr config, ptr kernel, ptr arguments)
    CALL("_cudaLaunchKernelEx", P(config), P(kernel), P(arguments))
EXPORT i32 _cudaLaunchKernel(ptr kernel, i32 gx, i32 gy, i32 gz, i32 bx, i32 by, i32 bz,
                             ptr arguments, i64 smem, ptr stream)
    CALL("_cudaLaunchKernel", P(kernel), I(gx), I(gy), I(gz), I(bx), I(by), I(bz), P(arguments),
         L(smem), P(stream))
EXPORT i32 _cuTensorMapEncodeTiled(ptr map, i32 type, i32 rank, ptr address, ptr sizes, ptr strides,
                                   ptr box, ptr steps, i32 interleave, i32 swizzle, i32 promotion,
                                   i32 fill)
    CALL("_cuTensorMapEncodeTiled", P(map), I(type), I(rank), P(address), P(sizes), P(strides),
         P(box), P(steps), I(interleave), I(swizzle), I(promotion), I(fill))

/* Devices and streams: one device, and every launch has finished when it returns. */
EXPORT i32 _cudaDeviceGetAttribute(ptr value, i32 attribute, i32 device)
    CALL("_cudaDeviceGetAttribute", P(value), I(attribute), I(device))
EXPORT i32 _cudaGetDevice(ptr device) CALL("_cudaGetDevice", P(device))
EXPORT i32 _cudaSetDevice(i32 device) CALL("_cudaSetDevice", I(device))
EXPORT i32 _cudaGetDeviceCount(ptr count) CALL("_cudaGetDeviceCount", P(count))
EXPORT i32 _cuDeviceGet(ptr device, i32 ordinal) CALL("_cuDeviceGet", P(device), I(ordinal))
EXPORT i32 _cudaDeviceSynchronize(void) { return dispatch("_cudaDeviceSynchronize", 0, 0); }
EXPORT i32 _cudaStreamCreate(ptr stream) CALL("_cudaStreamCreate", P(stream))
EXPORT i32 _cudaStreamDestroy(ptr stream) CALL("_cudaStreamDestroy", P(stream))
EXPORT i32 _cudaStreamSynchronize(ptr stream) CALL("_cudaStreamSynchronize", P(stream))

UNMODELLED(_cuLibraryGetGlobal)
UNMODELLED(_cuLibraryGetKernelCount)
UNMODELLED(_cuLibraryGetManaged)
UNMODELLED(_cuLibraryGetModule)
UNMODELLED(_cuLibraryGetUnifiedFunction)
UNMODELLED(_cuLibraryLoadFromFile)
UNMODELLED(_cudaEventCreate)
UNMODELLED(_cudaEventDestroy)
UNMODELLED(_cudaEventElapsedTime)
UNMODELLED(_cudaEventRecord)
UNMODELLED(_cudaFree)
UNMODELLED(_cudaFreeAsync)
UNMODELLED(_cudaFreeHost)
UNMODELLED(_cudaGetDeviceProperties)
UNMODELLED(_cudaGraphDestroy)
UNMODELLED(_cudaGraphExecDestroy)
UNMODELLED(_cudaGraphInstantiate)
UNMODELLED(_cudaGraphLaunch)
UNMODELLED(_cudaLibraryGetGlobal)
UNMODELLED(_cudaLibraryGetManaged)
UNMODELLED(_cudaLibraryGetUnifiedFunction)
UNMODELLED(_cudaLibraryLoadFromFile)
UNMODELLED(_cudaMalloc)
UNMODELLED(_cudaMallocAsync)
UNMODELLED(_cudaMallocHost)
UNMODELLED(_cudaMallocManaged)
UNMODELLED(_cudaMemcpy)
UNMODELLED(_cudaMemcpyAsync)
UNMODELLED(_cudaMemset)
UNMODELLED(_cudaMemsetAsync)
UNMODELLED(_cudaProfilerStart)
UNMODELLED(_cudaProfilerStop)
UNMODELLED(_cudaStreamAddCallback)
UNMODELLED(_cudaStreamBeginCapture)
UNMODELLED(_cudaStreamEndCapture)
UNMODELLED(_cudaStreamWaitEvent)
UNMODELLED(CuteDSLRT_Function_Run)
UNMODELLED(CuteDSLRT_Module_Create_From_Bytes)
UNMODELLED(CuteDSLRT_Module_Destroy)
UNMODELLED(CuteDSLRT_Module_Get_Function)
UNMODELLED(CuteDSLRT_NvJaxCutlassCallExecute)
UNMODELLED(CuteDSLRT_NvJaxCutlassCallExecuteNoCudaGraph)
UNMODELLED(CuteDSLRT_NvJaxCutlassCallExecuteNoCudaGraph_v1)
UNMODELLED(CuteDSLRT_NvJaxCutlassCallExecuteNoCudaGraph_v2)
UNMODELLED(CuteDSLRT_NvJaxCutlassCallExecute_v1)
UNMODELLED(CuteDSLRT_NvJaxCutlassCallExecute_v2)
UNMODELLED(CuteDSLRT_NvJaxCutlassCallInstantiate_v2)
UNMODELLED(CuteDSLRT_NvJaxCutlassCallPrepare)
UNMODELLED(CuteDSLRT_NvJaxCutlassCallPrepare_v1)
UNMODELLED(CuteDSLRT_NvJaxCutlassCallPrepare_v2)
UNMODELLED(CuteDSLRT_NvJaxCutlassCallStateTypeId_v2)
UNMODELLED(CuteDSLRT_NvJaxCutlassCallStateTypeInfo_v2)

/* Errors. */
EXPORT const char *cuda_dialect_get_error_name(i32 code) {
  switch (code) {
    case 0: return "cudaSuccess";
    case 1: return "cudaErrorInvalidValue";
    case 3: return "cudaErrorInitializationError";
    case 9: return "cudaErrorInvalidConfiguration";
    case 98: return "cudaErrorInvalidDeviceFunction";
    case 101: return "cudaErrorInvalidDevice";
    case 719: return "cudaErrorLaunchFailure";
    case 801: return "cudaErrorNotSupported";
  }
  return "cudaErrorUnknown";
}

EXPORT const char *CuteDSLRT_GetErrorName(i32 code) { return cuda_dialect_get_error_name(code); }
EXPORT const char *CuteDSLRT_GetErrorString(i32 code) { return code ? detail : "no error"; }

EXPORT void cuda_dialect_print_on_error(i32 code) {
  if (code) fprintf(stderr, "emulator: %s: %s\n", cuda_dialect_get_error_name(code), detail);
}

/* No abort: the exception comes out of the launch that follows, or when the host code returns. */
EXPORT void cuda_dialect_assert_success(i32 code) { cuda_dialect_print_on_error(code); }

EXPORT void CuteDSLRT_TVMFFISetRaisedCudaError(raise_parts raise, i32 code) {
  char head[64];
  snprintf(head, sizeof head, "CUDA Error Code: %d\n", code);
  const char *parts[] = {head, detail};
  raise("EmulatorError", parts, 2);
}

EXPORT void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(
    raise_parts raise, i32 gx, i32 gy, i32 gz, i32 bx, i32 by, i32 bz, i32 threads, i64 smem,
    i32 device, i32 max_threads, i32 max_bx, i32 max_by, i32 max_bz, i32 max_gx, i32 max_gy,
    i32 max_gz, i32 max_smem, i32 max_smem_optin, const char *violation, const char *file, i32 line,
    i32 column, i32 end) {
  char text[2048];
  snprintf(text, sizeof text,
           "CUDA Error Code: %d\nkind=cuda_launch\nerror_name=cudaErrorInvalidConfiguration\n"
           "error_string=invalid configuration argument\ngrid=%d,%d,%d\nblock=%d,%d,%d\n"
           "block_threads=%d\ndynamic_smem_bytes=%lld\ndevice=%d\nviolation=%s\nsource_file=%s\n"
           "source_line=%d\nsource_col=%d\nsource_end_col=%d\nlimits=threads %d, block %d,%d,%d, "
           "grid %d,%d,%d, shared %d, opt-in %d\n",
           INVALID_CONFIGURATION, gx, gy, gz, bx, by, bz, threads, (long long)smem, device,
           violation ? violation : "", file ? file : "", line, column, end, max_threads, max_bx,
           max_by, max_bz, max_gx, max_gy, max_gz, max_smem, max_smem_optin);
  const char *parts[] = {text};
  raise("EmulatorError", parts, 1);
}

/* `state` holds the library's handle, 0 before the first call. */
EXPORT i32 cuda_dialect_init_library_once(ptr *state, i32 (*init)(ptr *), i32 (*load)(ptr *, i32),
                                          raise_text raise) {
  if (*state) return 0;
  i32 code = init(state);
  if (!code) code = load(state, 0);
  if (code) {
    char text[sizeof detail + 64];
    snprintf(text, sizeof text, "CUDA Error Code: %d\n%s", code, detail);
    raise("EmulatorError", text);
    *state = 0;
  }
  return code;
}

/* Runs at process exit, when Python may be gone; handles cost nothing to keep. */
EXPORT void cuda_dialect_unload_library_once(ptr *state) { *state = 0; }
