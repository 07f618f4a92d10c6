"""Time limits of tests: many times the usual duration, for slow or busy machines."""

PROCESS = 1000.0  # seconds for a process to end or to answer; less than pytest's for a test
