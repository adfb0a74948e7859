"""A data-parallel group: its scheduler, its KV blocks (RTC) and its sequences (xDeepServe 4.2)."""
