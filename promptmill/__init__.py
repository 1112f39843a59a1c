"""promptmill: prompts in, a training dataset out, with a model that you serve yourself."""

__version__ = "0.1.0"
