"""Timing-only runs: the engine's own code path with the arithmetic left out, so that 671B models run."""
