"""What the service keeps: a database and files."""
