"""MicroVM sandboxes: a leaf without torch."""
