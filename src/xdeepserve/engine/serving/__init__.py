"""A request on the host: the engine that serves it, its output, and the TEs that come and go meanwhile."""
