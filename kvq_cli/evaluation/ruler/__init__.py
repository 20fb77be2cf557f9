"""RULER's 13 synthetic long-context tasks, made offline for any tokenizer and context length."""
