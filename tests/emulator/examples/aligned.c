/* Preloaded: gives torch's CPU tensors the 512-byte alignment of CUDA allocations. */
#include <errno.h>
#include <malloc.h>
#include <stddef.h>

int posix_memalign(void **memory, size_t alignment, size_t size) {
  *memory = memalign(alignment < 512 ? 512 : alignment, size);
  return *memory ? 0 : ENOMEM;
}
