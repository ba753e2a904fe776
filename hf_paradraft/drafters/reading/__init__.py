"""Networks that read texts, and their caches: what most kinds draft by."""
