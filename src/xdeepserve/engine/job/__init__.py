"""Jobs with a task or two, and the transfer of requests from prefill to decode (xDeepServe 5.1)."""
