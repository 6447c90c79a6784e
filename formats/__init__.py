"""The pack on disk: geometry, manifest, checks. Knows bytes, not MLX, not models."""
