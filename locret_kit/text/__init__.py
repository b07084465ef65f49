"""Text of users: chat templates around it, documents as plain text, and where its tokens lie. Knows nothing of models."""
