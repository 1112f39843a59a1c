"""Asking: client (one request), picker and window (pure policy), mill (the running engine)."""
