"""Device parts for sm_100 (Blackwell) that ops share. Needs CuTe DSL, all but ``tile``."""
