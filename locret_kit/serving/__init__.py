"""A server of OpenAI's protocol over bounded caches: memory is known before it starts."""
