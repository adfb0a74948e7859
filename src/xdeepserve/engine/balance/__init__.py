"""Who gets the next request: balancing over DP groups (xDeepServe 4.3). Pure decisions, no state, no I/O."""
