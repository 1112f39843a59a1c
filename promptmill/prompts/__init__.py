"""Reading prompts: sources (bytes → rows), formats (row → conversation), manifest (all of it, rendered)."""
