"""Choosing a tree: numbers in, numbers out."""
