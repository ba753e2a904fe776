"""DFlash and DSpark: blocks filled in one forward over the target's hidden states."""
