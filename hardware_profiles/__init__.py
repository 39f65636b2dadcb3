"""hardware_profiles."""
