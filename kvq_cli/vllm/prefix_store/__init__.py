"""Prefixes outside of vLLM's cache: full blocks of prompts in a folder that processes and machines share.

    store.py        files of blocks: atomic, checked, least recently used first out
    writer.py       the thread that writes them
    records.py      a block of tokens as bytes: klt's codes, or keys and values as they are
    pages.py        where keys and values lie in vLLM's caches
    identity.py     what two engines must have in common to share blocks
    settings.py     the options, from the command line to the connector
    planning.py     which blocks to load and to store: the scheduler's half
    transfers.py    between vLLM's cache and the files: a worker's half
    connector.py    `KvqConnector`, vLLM's interface
    stock.py        a server with vLLM's own cache

vllm is imported by connector.py alone.
"""
