"""Windows of generic addresses, above the host's addresses: shared, local memory, parameters."""

WINDOW_SHIFT = 60
LOCAL_WINDOW = 5 << WINDOW_SHIFT
SHARED_WINDOW = 6 << WINDOW_SHIFT
PARAMETER_WINDOW = 7 << WINDOW_SHIFT
