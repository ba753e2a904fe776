"""ParallelSpec: one layer on the target's own embedding and head (Xiao et al., 2024)."""
