"""EAGLE-3 and P-EAGLE: a decoder layer over fused hidden states of the target."""
