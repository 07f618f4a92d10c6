"""Runtime with which CuTe DSL's host code launches into the emulator, without a GPU or driver."""
