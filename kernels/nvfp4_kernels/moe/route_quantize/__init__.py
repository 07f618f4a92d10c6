"""Routing of a batch and its tokens in token tiles by one launch, where the batch is small."""
