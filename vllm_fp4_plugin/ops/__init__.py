"""Custom ops that compiled graphs hold: flat arguments, one dispatch to the kernel each."""
