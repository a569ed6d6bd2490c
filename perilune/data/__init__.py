"""Text in, packed token batches out."""
