"""The demo: train, quantise, serve and measure a small language model on any machine."""
