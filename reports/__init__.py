"""Pictures and pages of plans and comparisons."""
