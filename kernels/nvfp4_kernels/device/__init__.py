"""Device code in CuTe DSL that no op and no architecture owns."""
