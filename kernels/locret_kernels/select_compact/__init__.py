"""Which rows of each head stay, and moving them to the front in place."""
