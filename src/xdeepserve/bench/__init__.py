"""`xdeepserve bench`: what is measured or modelled, beside what the papers publish."""
