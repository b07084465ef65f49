"""Training of retaining heads: Lightning around the observer; the mathematics is in ``cis``."""
