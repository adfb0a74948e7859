"""Experts as services: each client has slots on each server, which the client writes and reads (EaaS 3)."""
