"""Self-contained HTML pages of result folders: evaluations, reproductions, studies and benchmarks."""
