"""What plans and comparisons look like to people: facts, pictures and pages."""
