"""Self-check at start: every kind of fused op runs once beside its unfused form, on random inputs.

The first proof that an op may be fused is the model's source, see ``forward_analysis``; the second
is this run, before memory is measured, graphs are captured and anything is compiled. An op whose
result differs by more than rounding is unfused, with a warning.
"""
