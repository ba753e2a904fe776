"""MTP: layers that a checkpoint brings, or that were trained like them, which guess a token after
the other.
"""
