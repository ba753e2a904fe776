"""The doors into transformers and the Hub."""
