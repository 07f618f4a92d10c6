"""Broken checkpoints: what is made of every tensor, file and config field, and what becomes of it.

    python -m tests.faults                  every fault of every format, as a table
    python -m tests.faults --format modelopt --only truncated NaN

A fault must be refused before anything is served, by a message that names the file, tensor or
field; one that is served must give what the sound checkpoint gives.
"""
