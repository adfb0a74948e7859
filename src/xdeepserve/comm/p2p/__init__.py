"""Send and receive between any two ranks: the eight steps of XDS 3.1."""
