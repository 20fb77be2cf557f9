"""Timing, memory and peers side by side."""
