"""Running examples: from settings to rows."""
