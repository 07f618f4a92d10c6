"""Which of vLLM's features work with ``nvfp4-tc`` on a CPU, by the tests that show it.

``python -m tests.features`` writes ``examples/results/features.md`` from the tests that are marked
``@pytest.mark.feature(name, outcome, note)``.
"""
