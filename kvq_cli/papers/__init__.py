"""Reproduction of the papers: studies, published numbers, and targets (tables and figures).

The product does not import this package; only the commands `kvq analyze`, `kvq reproduce`, `kvq results --against` and
`kvq bits --papers` do, inside functions.

    studies/     one file per study of keys, values, weights and errors: `kvq analyze NAME`
    published/   the numbers that the papers print, as CSV
    targets      what is run for each table or figure (targets.yaml); `run` runs it, `report` writes its tables
"""
