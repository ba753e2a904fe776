"""The engine: one file per step of a round."""
