"""Train a Llama of up to 250 million parameters on the Python sources of this machine."""
