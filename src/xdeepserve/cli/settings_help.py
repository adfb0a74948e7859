"""The settings of a deployment, as the help of the commands that take `--set` lists them."""

from __future__ import annotations

SETTINGS = """\
settings (--set key=value, any number of times):
  dies                              dies of the pod (colocated: up to the number of routed experts)
  prefill.count, decode.count       TEs of each kind (pd; transformerless has one decode TE)
  prefill.dies, decode.dies         dies of each TE
  attention.domains, attention.dies DP domains, and attention dies in each (moe-attention, transformerless)
  attention.microbatches            of a step: experts work on one while attention works on another
  experts.routed_dies, experts.shared_dies
                                    dies of routed experts, and with a copy of the shared one
  experts.redundant_slots           on each die with routed experts, for replicas of hot ones (EPLB)
  experts.balance_interval          virtual seconds of load that decide on replicas, 60 by default; 0: never
  experts.balance_slices            time slices in which that load is counted, 4 by default
  prefill.hardware                  cm384, or 910b: NPUs of Atlas 800T A2 servers beside the SuperPod
  fabric                            between prefill and decode: ub, roce, vpc, or auto, the first of these
                                    that both sides are on
  transfer                          of KV between them: by request, or by layer, while later ones are computed
  lockstep                          true: kernels go over all dies at once, also over hundreds (not pd); by
                                    default in superpod, and in monolithic and colocated with large models
  dataflow                          true: no barriers between attention and experts
  tp, prefill.tp, decode.tp         dies that share a DP group's heads: 1, 2, 4 or 8 (colocated; pd);
                                    prefill.tp: up to 4 by default, as dies and model allow
  tp_mode, prefill.tp_mode          "tp", or "sp-tp-sp": tokens are cut before and after attention
  pipeline.microbatches             1, or 2 that overlap on dies with attention and experts
  pipeline.overlap                  by "cores" or "engines"; by default engines in prefill TEs, else cores
  pipeline.attention_cores          AIC cores of the attention stream, 16 by default, of 24
                                    (of 20 if prefill on 910b overlaps by cores, too)
  max_model_len                     longest context, prompt and new tokens together
  threads                           threads of this computer (or XDEEPSERVE_THREADS)
  mtp                               drafts per step, 0, 1 or 2; --mtp is short for it
  mtp_reuse                         true: the second draft comes from the first MTP layer, used again
  seed                              of requests that bring no seed
  scheduler.max_num_seqs            sequences in a step, per DP group
  scheduler.max_num_batched_tokens  token rows in a step, per DP group; longer prompts go in chunks
  prefill.*, decode.*               the same two for the TEs of a kind
  scheduler.max_waiting             sequences that may wait, in all; further ones are refused (429)
  cache.block_size                  positions in a KV block, a multiple of 16
  cache.num_blocks                  KV blocks per DP group
  cache.prefix                      false: prefixes are not kept for later prompts
  cache.max_keys                    prompt_cache_keys whose prefixes a DP group can tell, 1024 by default
  cache.num_host_blocks             KV blocks per die in the host's memory
  cache.preemption                  recompute, or swap to the host
  cache.load                        blocks on the host: auto (what is sooner), always, never
  health.suspect_s, health.lost_s   virtual seconds without an answer after which a DP group gets no new work
                                    (5), and after which the engine gives up (60)
  health.probe_s                    between probes of DP groups without work, and before a failed link between
                                    prefill and decode is tried again; 1 by default
  scheduler.dispatch                of prompts: collaborative, or two-level
  scheduler.decode                  of decoding sequences to DP groups: kv, or round-robin
  output.reasoning                  what chats parse: auto, off, deepseek (<think>)
  output.tools                      tool calls: auto, off, deepseek, deepseek_v31, kimi, hermes
  execution.mode                    graph: a step is one launch, captured once; op: operator by operator;
                                    by default op on prefill TEs, else graph. This and the next ones change
                                    virtual time, and no token. pd, transformerless and superpod launch so;
                                    elsewhere the host costs nothing until one of them is set
  execution.overlap                 true: a step is planned and launched while the one before runs
  execution.mtp                     pipelined, or naive: back to the host before each draft
  execution.pin_cores, execution.cache_graphs, execution.control_gc
                                    false: the jitter of launches without these cures
  execution.prefill.mode, ...       any of them for prefill TEs alone; execution.decode.mode, ... (pd,
                                    transformerless)
  hardware.hbm_mb                   memory of a die in MiB, 65536 by default
"""
