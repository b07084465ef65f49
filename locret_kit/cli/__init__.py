"""The command-line tools, one module a command, and the configuration they share."""
