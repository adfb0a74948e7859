"""Disaggregation: prefill from decode (xDeepServe 5.1)."""
