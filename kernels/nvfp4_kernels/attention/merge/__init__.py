"""Merge of attention results over disjoint segments of the keys."""
