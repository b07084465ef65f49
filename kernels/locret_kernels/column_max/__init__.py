"""The CIS target: the largest logit, or log-probability, that any answer query gives each slot."""
