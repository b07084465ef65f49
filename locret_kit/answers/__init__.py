"""The reader of answers: an answer's pieces as events, of thoughts, text and calls of tools."""
