"""A local checkpoint: its files, the kinds of its layers, and whether a load was complete."""
