"""Experts as services: a slot for each client on each server, which clients write and read (EaaS 3)."""
