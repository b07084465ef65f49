"""Data preparation: text in, token ids and answer spans out. Knows nothing of models, training or the runtime."""
