"""kvq's methods inside vLLM: a plugin for its server, and what `kvq serve` checks before it starts one.

    layout.py        where packed tensors lie in pages; block sizes; blocks in a memory
    placing.py       which layer's page holds which of them
    pages.py         a stream of the cache over pages
    paged_layer.py   attention of a batch of sequences over pages
    batch.py         the sequences of a step        step.py      those that decode one token each
    exact_blocks.py  vLLM's blocks of tokens in full precision
    local_layers.py  layers with a sliding window, which vLLM caches
    backend.py       vLLM's attention backend     metadata.py  what vLLM tells a layer of a step
    engine.py        what the layers of an engine share
    rope.py          undoing RoPE on write        served.py  the method in vLLM's flags
    shard.py         the heads of a rank          gathered.py  values that all ranks pack together
    checks.py        reasons to refuse            plugin.py  registration
    command.py       vLLM's arguments             supervise.py  a server that may die
    flags.py         vLLM's command line          parse.py  vLLM's own parser
    prefix_store/    blocks of prompts in a folder, for vLLM's own cache too

vllm itself is imported by backend.py, engine.py, exact_blocks.py and, inside functions, by parse.py, plugin.py and
rope.py; and by prefix_store/connector.py.
"""
