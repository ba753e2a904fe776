"""Publishers' folders turned into ours: one file a publisher, and their common parts."""
