"""Examples that ship: ``--plugin locret_examples.value_attention``."""
