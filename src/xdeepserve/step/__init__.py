"""A decoder layer as data: stages and exchanges in the paper's words, described once and run by every runner.

- `stage`: what a Program is made of; `frame`: what a stage's kernel sees: rows, buffers, weights of a layer
- `attention`: the operations of MLA; `feed`: those of MLPs, experts and gate
- `layer`: a decoder layer, from top to bottom; `passes`: what a pass has besides layers
- `shard`: parallelism as a transformation of a Program
- `linear`: linear layers of a recipe, on the threads of this computer
"""
