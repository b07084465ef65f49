"""A retaining head, from q, k and v to predicted importance, without the concatenation between them."""
