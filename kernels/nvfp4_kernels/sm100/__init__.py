"""Device parts for sm_100 (Blackwell) that ops share."""
