"""Attention and quantization kernels over packed key-value caches. Needs torch and triton, nothing else.

An operation is a folder: its `__init__.py` documents one function that dispatches on the device, `reference.py` is the
same in short PyTorch, `kernel.py` (or several files) the Triton implementation, `launch.py` its arguments,
`aot_cases.py` the launches that are compiled without a GPU, `tuning.json` the tuned configurations.

    decode_attention     few queries per row, packed cache      quantize_pack     group quantization and packing
    quantized_matvec     q K^T and p V as separate products     squat_quantize    the same with SQuat's error correction
    rematerialize        attention over cached layer inputs     assign_centroids  the steps of k-means
    transform_attention  attention over codes of a transform's  transform_pack    encoding and packing of such codes
                         components

`tuning` reads the tables, `static` compiles the launches of `aot_cases` and reports registers, spills and instructions
(`machine_code` reads these), `planar` and `fields` place codes in words, `key_scores`, `spans` and `span_softmax` serve
`rematerialize`, `launch_device` makes the tensors' GPU the current one, `cache_keys` makes keys of compiled
kernels the same in every process. Sizes in docstrings: B rows (batch), H kv heads, Q query heads, T tokens, D head_dim.
"""
