"""The OpenAI-compatible endpoint. Of all others only doors of wings import aiohttp."""
