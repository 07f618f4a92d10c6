"""Barriers with their counts and vector clocks: mbarrier objects, CTA and cluster barriers."""
