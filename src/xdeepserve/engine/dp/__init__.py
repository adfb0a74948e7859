"""Data-parallel (DP) group: a scheduler, the KV blocks (RTC) and the sequences (xDeepServe 4.2)."""
