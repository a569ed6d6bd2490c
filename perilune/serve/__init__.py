"""Serving: requests in, tokens out, over one paged pool for KDA states and MLA latents (report §5.4)."""
