"""Sizes of the model and the batch."""

LAYERS = 4
WIDTH = 2048
HIDDEN = 8192
CLASSES = 1024
BATCH = 16384
