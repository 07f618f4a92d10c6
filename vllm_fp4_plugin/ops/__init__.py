"""Custom ops of compiled graphs: each takes flat arguments and costs one torch dispatch."""
