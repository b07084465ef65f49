"""Text of users: chat templates, documents as plain text, and positions of tokens. Knows nothing of models."""
