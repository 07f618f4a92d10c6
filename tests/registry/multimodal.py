"""Miniatures of multimodal models: what shrinking their config classes does not give."""

from tests.registry.entry import Entry

ENTRIES: dict[str, Entry] = {}
