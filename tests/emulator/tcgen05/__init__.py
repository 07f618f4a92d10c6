"""The fifth-generation tensor core as pure functions on numpy arrays: no warps, no time, no checks.

Tensor memory is a C-contiguous uint32 array [128 lanes, 512 columns], shared memory a uint8 array
whose length is a multiple of 16. What the PTX ISA says in prose or tables is cited as "PTX ISA
x.y.z"; what only NVIDIA's CUTLASS shows is marked "CUTLASS"; the rest is marked "assumed".
"""
