"""Shapes that test_whole_kernels.py runs."""

from tests.test_emulator.kernels.config import GemmConfig, Shape

ONE_SM, TWO_SM = GemmConfig(), GemmConfig(two_sm=True)
WIDE = GemmConfig(tile_n=256)
WIDE_TWO_SM = GemmConfig(tile_n=256, two_sm=True)

SHAPES = (
    Shape(128, 128, 256, ONE_SM, "float32"),  # one tile, one step
    Shape(128, 256, 256, WIDE),
    Shape(256, 128, 256, TWO_SM, "float16"),
    Shape(256, 256, 512, WIDE_TWO_SM, "float32"),
    Shape(384, 256, 1280, ONE_SM, sms=2),  # three tiles each, more steps than stages
    Shape(768, 256, 1280, TWO_SM, sms=4),
    Shape(384, 256, 768, WIDE, "float16", sms=1),  # one accumulator
    Shape(1, 8, 32, ONE_SM),  # ragged everywhere
    Shape(130, 200, 288, ONE_SM, "float16", sms=3),
    Shape(300, 132, 1312, TWO_SM, "float32", sms=4),
    Shape(129, 264, 96, WIDE_TWO_SM, sms=2),
)
