"""New weights into a running model: whole, or not at all."""
