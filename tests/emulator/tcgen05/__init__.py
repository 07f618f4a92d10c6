"""The fifth-generation tensor core as pure functions on numpy arrays: no warps, no time, no checks.

Tensor memory is a C-contiguous uint32 array [128 lanes, 512 columns], shared memory a uint8 array
whose length is a multiple of 16. Facts from the PTX ISA's text or tables are cited as "PTX ISA
x.y.z", facts from NVIDIA's CUTLASS alone as "CUTLASS"; other facts are marked "assumed".
"""
