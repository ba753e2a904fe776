"""Networks that read texts, and their caches, by which most kinds draft."""
