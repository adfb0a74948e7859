"""The OpenAI-compatible endpoint: the only package that imports aiohttp."""
