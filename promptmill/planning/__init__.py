"""`promptmill plan`: what the prompts are, and how long they would take (the run in virtual time)."""
