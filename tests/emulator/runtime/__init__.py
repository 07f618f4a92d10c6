"""CuTe DSL's host code launching into the emulator, on a machine with neither GPU nor driver."""
