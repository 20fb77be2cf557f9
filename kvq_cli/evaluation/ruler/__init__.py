"""RULER's 13 synthetic long-context tasks, generated offline for any tokenizer and context length."""
