"""Device code for sm_100 (Blackwell) that ops share."""
