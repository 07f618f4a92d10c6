"""Sort of a batch's slots by expert into padded token tiles (align)."""
