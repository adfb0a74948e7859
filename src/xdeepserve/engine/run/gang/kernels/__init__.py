"""What the gang runs: Numba kernels over the memories of many dies. See the twin of each stage in
`engine/programs` and `comm`, whose bytes they leave behind."""
