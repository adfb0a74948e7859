"""Post-training quantisation to INT8: weights per output channel, activations per token.

Techniques come from xDeepServe 4.7 (SmoothQuant and GPTQ) and CloudMatrix384 4.5 (scale search, outlier
suppression, clipping, error compensation). Each technique has a file and maps arrays to arrays.
`layer_quantizer` applies them to a decoder layer, `job` to a checkpoint on disk, resumable.

Quantisation is offline work. Unlike `canonical`, it may use BLAS, so the last bits may differ between
machines. Its output is exact from then on: integers and scales.
"""
