"""Storage formats of packed tokens, a file or a folder each: `Dense`, `Uniform`, `Codebook`, `Directions` and
`Transformed`.

`format.py` says what a format is: its tensors (`Format`), how they are stored as a compile-time constant (`SideSpec`),
and the functions by which kernels read them. Nothing outside of a format's folder asks which one it is.
"""
