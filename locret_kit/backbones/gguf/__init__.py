"""Backbones out of GGUF files: their matrices stay packed, as they lie in the file."""
