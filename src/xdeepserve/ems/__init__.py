"""EMS, the disaggregated memory pool: host DRAM over volumes, for KV and for models (CloudMatrix 4.4).

ring            which server owns which key: consistent hashing
allocator       a server's DRAM in several granularities
dram            the DRAM tier: which copies it holds, which are evicted
mp_server       one host's DRAM over one volume: phases of a put, pins, leases, eviction
mp_controller   the view of the ring, namespaces, members
mp_client       MP SDK: from keys to servers; ranges that may be accessed, views that go stale
context_cache   the context caching SDK: blocks of KV by the tokens before them
memory_pool     all of it on one pod, and what faults do to its parts
model_cache     the model caching SDK: weights as blocks, with versions, read once from storage
directory       the pool's volumes on this computer, and the lock of their user
pool_use        the pool of a deployment, as its engine uses it
pool_prefixes   a DP group's prefixes in the pool: read before prefill, written after steps
pool_weights    a TE's weights by way of the pool
command         `xdeepserve ems`
"""
