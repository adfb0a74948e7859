"""Messages, as Anthropic's API has them."""
