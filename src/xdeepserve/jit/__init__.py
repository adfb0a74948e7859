"""How kernels are compiled, cached and given arrays. Knows no model and no hardware."""
