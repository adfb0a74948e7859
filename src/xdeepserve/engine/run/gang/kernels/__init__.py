"""What the gang runs: Numba kernels over the memories of many dies. See the twin of each stage in
`step` and `comm`, whose bytes they leave behind."""
