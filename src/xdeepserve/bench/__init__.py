"""`xdeepserve bench`: measured or modelled values, beside the papers' published values."""
