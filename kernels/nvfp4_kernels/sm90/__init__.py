"""Device code for sm_90 that ops share."""
