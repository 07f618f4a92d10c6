"""Device code in CuTe DSL shared by all ops and architectures."""
