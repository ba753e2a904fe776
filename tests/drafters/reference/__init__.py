"""The formulas of DFlash, DSpark and EAGLE-3, written out for one text without caches, batches or
libraries.
"""
