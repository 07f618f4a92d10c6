"""Strategies and settings of property tests."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

# Reproducible, and without a database, so that a run leaves no files behind.
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True, database=None)

batch_shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
rows = st.integers(0, 9)
k_sizes = st.integers(1, 5).map(lambda blocks: 16 * blocks)
generators = st.integers(0, 2**32 - 1).map(np.random.default_rng)
