"""What is done: the journal (SQLite, durable per answer), segments (Parquet, immutable), and both as one."""
