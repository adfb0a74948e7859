"""Chats, completions and responses, as OpenAI's API and vLLM's extensions have them."""
