"""Gemma 4 assistants: drafters that read the target's own keys and values."""
