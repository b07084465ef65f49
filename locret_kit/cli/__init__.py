"""The command-line tools, a module for those that belong together, and the configuration they share."""
