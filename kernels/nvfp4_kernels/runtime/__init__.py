"""Way of a kernel to its launch: traced, compiled, kept, loaded, recorded and replayed."""
