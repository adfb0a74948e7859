"""A task executor: the loop over its DP groups, its shell, its heartbeats (xDeepServe 4.2)."""
