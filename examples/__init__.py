"""Examples that ship: ``--plugin locret_examples.value_attention``, and retaining heads as a press of kvpress."""
