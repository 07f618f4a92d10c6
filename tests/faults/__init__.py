"""Broken checkpoints: faults of every tensor, file and config field, with their outcomes.

    python -m tests.faults                  every fault of every format, as a table
    python -m tests.faults --format modelopt --only truncated NaN

A fault must be refused before anything is served, by a message that names the file, tensor or
field. A fault that is served nevertheless must give the sound checkpoint's log-probabilities.
"""
