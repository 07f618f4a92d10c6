"""Runner of NVIDIA's unmodified CuTe DSL examples on the emulator: a development tool."""
