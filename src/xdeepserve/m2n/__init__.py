"""M2N: tokens from attention dies to expert dies by network cards, and answers back (MegaScale-Infer 5)."""
