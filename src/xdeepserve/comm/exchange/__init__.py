"""Dispatch and combine by pull: the seven steps of XDS 3.2."""
