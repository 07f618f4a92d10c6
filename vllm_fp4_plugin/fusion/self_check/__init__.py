"""Self-check at start: every kind of fused op runs once beside its unfused form, on random inputs.

Who feeds whom is read from source, see ``forward_analysis``; this is the second proof, by running. It
comes before memory is measured, graphs are captured and anything is compiled. What differs by more
than rounding is unfused, with a warning.
"""
