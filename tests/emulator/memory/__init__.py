"""The state spaces, with bounds, initialisation and happens-before checks on every access."""
