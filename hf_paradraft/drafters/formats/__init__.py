"""What publishers' folders hold, turned into ours: one file a publisher, and what they have in common."""
