"""Many plans at once: sweeps over a grid, and planning in continuous integration."""
