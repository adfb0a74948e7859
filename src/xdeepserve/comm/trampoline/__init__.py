"""A2E and E2A between attention dies and expert dies (XDS 3.3, 5.3)."""
