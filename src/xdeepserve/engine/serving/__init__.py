"""A request on the host: its parameters, the engine that serves it, and its output."""
