"""Jobs of one task or two, and what carries a request from prefill to decode (xDeepServe 5.1)."""
