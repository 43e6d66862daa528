"""The directory on disk: manifest, parts, and the files beside them. Knows torch, not vLLM."""
