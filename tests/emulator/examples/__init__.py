"""Running NVIDIA's unmodified CuTe DSL examples on the emulator; a development tool, not a test."""
