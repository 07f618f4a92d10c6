"""Features of vLLM that work with ``nvfp4-tc`` on a CPU, and the tests that show so.

``python -m tests.features`` writes ``examples/results/features.md`` from the tests that are marked
``@pytest.mark.feature(name, outcome, note)``.
"""
