"""The bounded cache: key, value, position and score of a slot live side by side and move together."""
