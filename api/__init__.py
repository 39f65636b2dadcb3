"""The planning service: REST, jobs, store and web pages."""
