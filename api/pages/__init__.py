"""Web pages for people: plans with live progress, comparisons, a form, sign-in by key."""
