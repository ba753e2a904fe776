"""Publishing: knows files and JSON only."""
