"""Experts and weights of the tokens of a batch, from the router's logits."""
