"""Router top-k: experts and weights of a batch's tokens, from the router's logits."""
