"""Router top-k: selection of each token's experts from router logits, and routing weights."""
