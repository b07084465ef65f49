"""What the kit knows of architectures: dimensions, windows and RoPE of a model, and where its attention is met."""
