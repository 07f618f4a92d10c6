"""Memory of each state space, with bounds, initialisation and happens-before checks."""
