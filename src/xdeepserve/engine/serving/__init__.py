"""A request's life on the host: what it asks for, the engine that serves it, what comes back."""
