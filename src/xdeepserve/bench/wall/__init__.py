"""Measurements on this computer: wall time, rates and memory, beside its limits and other engines."""
