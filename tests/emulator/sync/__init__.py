"""Barriers, which hold counts and clocks: mbarrier objects, CTA and cluster barriers."""
