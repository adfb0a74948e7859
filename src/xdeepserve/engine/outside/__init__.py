"""Expert servers as processes: the monitor, what servers and clients say to it, and processes of our own."""
