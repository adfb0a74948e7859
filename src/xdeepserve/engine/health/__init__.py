"""Who is well: heartbeats of DP groups."""
