"""FusedDispatch and FusedCombine, by push (CM 4.2.1)."""
