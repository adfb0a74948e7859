"""Timing-only runs: the same Programs and the same virtual times, without the arithmetic.

`wiring` has stand-ins for memory, exchanges and sampling; the ways (`engine/ways`) have the exchanges.
"""
