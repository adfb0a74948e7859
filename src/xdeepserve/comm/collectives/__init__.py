"""Collectives of a group, in rounds that are barriers (CM 4.3)."""
