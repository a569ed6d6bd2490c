"""Chat format, both ways."""
