"""Device code for sm_90 (Hopper) that ops share."""
