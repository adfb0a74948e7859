"""What lies and runs on a die: its memory, its program, and the messages' answers.

program    waits for a plan, runs it, writes the results     sampler   from logits to tokens
drafts     MTP: passes that make drafts                      resolve   plans completed on the die
experts    the program of an expert die, in steps                dataflow  the same as tokens flow
memory     what lies in a die's HBM                              shapes    the same where nothing is computed
workspace  named buffers                                     replicas  of experts: routes and slots
"""
