"""The parts of bench_client.py, each run in a process of its own."""
