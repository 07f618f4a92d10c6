"""Linear methods of ``nvfp4-tc``: weights received from a checkpoint or quantised at load."""
