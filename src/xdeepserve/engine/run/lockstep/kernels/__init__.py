"""Numba kernels of lockstep, over the memories of many dies.

They leave the same bytes as the stages of `step` and `comm`, where each kernel has a twin.
"""
