"""A small training job whose plans are checked in continuous integration."""
