"""Barriers: mbarrier objects, CTA barriers and the cluster barrier. They hold counts and clocks
only."""
