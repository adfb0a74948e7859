"""Post-training quantisation to INT8: weights per output channel, activations per token.

xDeepServe 4.7 (SmoothQuant and GPTQ) and CloudMatrix384 4.5 (scale search, outlier suppression, clipping,
error compensation). One file a technique, arrays in and arrays out; `layer` applies them to a decoder layer,
`job` to a checkpoint, on disk and resumable.

This is offline work: unlike `canonical`, it may use BLAS, and its results may differ between machines in the
last bits. What it writes is exact from then on: integers and scales.
"""
