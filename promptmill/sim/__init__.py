"""A simulated SGLang server: its HTTP, its log lines, its scheduler's arithmetic, and scripted faults.

`python -m promptmill.sim --model-path NAME --port P` runs it; it takes SGLang's flags and a few of its own.
The scheduler alone, in virtual time, is `promptmill.sim.scheduler.Engine`. It imports nothing else of
promptmill.
"""
