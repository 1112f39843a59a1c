"""From answers to a dataset: quality (status and flags), views (trainer formats), dataset (publish), card."""
