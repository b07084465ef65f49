"""Long texts that are read once, asked many things, saved and loaded; and conversations about them."""
