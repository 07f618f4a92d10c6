"""Times measured on an H200, to compare with the time model.

Microseconds by model and tokens: a whole decoder layer with 192 keys, and its products one by one
(qkv_proj, o_proj, gate_up_proj with SiLU-mul, down_proj), at commit 36edee0e or with its tiles;
gate_up_proj of more than 64 tokens at 565efbc (examples/results/hopper_kernels.md).
"""

LAYERS_US: dict[str, dict[int, float]] = {
    "llama-8b": {1: 45.4, 8: 47.4, 16: 54.0, 32: 65.4, 64: 87.1},
    "llama-70b-tp4": {1: 45.5, 8: 46.7, 16: 50.8, 32: 59.4, 64: 76.5},
}
PRODUCTS_US: dict[str, dict[int, tuple[float, float, float, float]]] = {
    "llama-8b": {
        1: (6.3, 5.1, 18.4, 10.5),
        8: (6.5, 5.2, 18.6, 10.5),
        16: (7.2, 5.9, 20.9, 12.0),
        32: (8.0, 6.3, 24.8, 15.0),
        64: (10.4, 7.8, 30.8, 19.0),
        128: (14.8, 11.3, 44.6, 30.4),
        256: (23.7, 15.4, 85.9, 42.8),
    },
    "llama-70b-tp4": {
        1: (6.1, 4.8, 18.5, 10.5),
        8: (6.3, 4.7, 18.8, 10.5),
        16: (6.7, 5.4, 21.1, 11.8),
        32: (7.1, 6.0, 24.7, 13.2),
        64: (10.5, 7.2, 32.1, 17.0),
        128: (14.6, 9.7, 44.1, 23.9),
        256: (21.9, 14.2, 83.6, 40.7),
    },
}
