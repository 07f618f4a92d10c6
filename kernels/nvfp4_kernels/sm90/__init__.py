"""Device parts of sm_90 that ops share."""
