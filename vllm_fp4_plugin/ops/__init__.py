"""Custom ops in compiled graphs: flat arguments, one dispatch to the kernel each."""
