"""Times measured on an H200 (examples/results/hopper_kernels.md), to compare with the time model.

Microseconds by model and tokens: a whole decoder layer with 192 keys, and its products one by one
(qkv_proj, o_proj, gate_up_proj with SiLU-mul, down_proj).
"""

LAYERS_US: dict[str, dict[int, float]] = {
    "llama-8b": {1: 45.7, 4: 46.9, 8: 48.3, 16: 54.7, 32: 67.9, 64: 90.3, 128: 139},
    "llama-70b-tp4": {1: 46.1, 4: 46.9, 8: 47.5, 16: 52.7, 32: 63.3, 64: 82.3, 128: 110},
}
PRODUCTS_US: dict[str, dict[int, tuple[float, float, float, float]]] = {
    "llama-8b": {
        1: (6.2, 5.1, 18.3, 10.4),
        4: (6.3, 5.2, 18.4, 10.4),
        8: (6.4, 5.2, 18.4, 10.5),
        16: (7.1, 6.0, 20.6, 11.7),
        32: (8.7, 6.6, 24.5, 15.1),
        64: (11.0, 8.3, 30.2, 19.5),
        128: (15.9, 11.9, 44.6, 30.8),
        256: (22.7, 16.5, 85.9, 44.8),
    },
    "llama-70b-tp4": {
        1: (6.3, 4.6, 18.6, 10.7),
        4: (6.4, 4.6, 18.6, 10.8),
        8: (6.5, 4.5, 18.6, 10.7),
        16: (7.2, 5.3, 20.8, 11.7),
        32: (8.3, 6.0, 25.7, 13.6),
        64: (11.9, 7.0, 33.8, 18.0),
        128: (16.8, 9.8, 44.5, 25.1),
        256: (21.9, 13.5, 83.6, 41.2),
    },
}
