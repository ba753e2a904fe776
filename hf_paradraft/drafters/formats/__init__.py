"""Publishers' folders turned into ours: their layouts, and the common parts of these."""
