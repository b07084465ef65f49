"""Reading rows: summaries, paired differences, the page, kept text."""
