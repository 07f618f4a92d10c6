"""Sums of what each token's experts gave."""
