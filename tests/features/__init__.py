"""Table of the vLLM features that work with ``nvfp4-tc`` on a CPU, with the tests that prove it.

``python -m tests.features`` writes ``examples/results/features.md`` from the tests that are marked
``@pytest.mark.feature(name, outcome, note)``.
"""
