"""Examples of each subcommand, shown at the end of its `--help` and of its section in docs/CLI.md."""

from __future__ import annotations

EXAMPLES = {
    "recommend": (
        "kvq recommend --model smollm2 --memory 4GB --context 8192 --users 16",
        "kvq recommend --model Qwen/Qwen3-8B --gpu rtx4090 --context 65536 --dataset my.txt",
    ),
    "calibrate": (
        "kvq calibrate --method temporalkv --bits 2 --out results/mine",
        "kvq calibrate --method kvquant --bits 3 --model meta-llama/Llama-3.1-8B --dataset wikitext2 --dry-run",
    ),
    "tune": (
        "kvq tune --budget 2.25 --set recent=32 --set buffer=32",
        "kvq tune --budget 3 --candidates klt:join_keys=on,kivi-4bit:pre_rope=on,fp16 --minutes 30",
        "kvq tune --objective memory --kl 0.01 --model smollm2",
    ),
    "push": ("kvq push artifacts/reference/klt-2bit user/reference-klt-2bit",),
    "generate": (
        'kvq generate "The old harbour" --method kivi --bits 2',
        "kvq generate --file examples/needle.txt --artifact artifacts/reference/temporalkv-2bit",
        "kvq generate --file document.txt --save-cache document.safetensors",
        'kvq generate "Question: Who wrote it? Answer:" --load-cache document.safetensors',
        'kvq generate "What is the capital of France?" --model smollm2 --system "Answer in one word."',
    ),
    "chat": ("kvq chat --model smollm2", "kvq chat --method kivi --bits 4 --set sinks=32"),
    "serve": (
        "kvq serve --model smollm2 --method kivi --bits 2 --port 8000",
        "kvq serve --artifact artifacts/reference/temporalkv-2bit --max-model-len 1024 --dry-run",
    ),
    "eval": (
        "kvq eval --task perplexity --compare fp16,kivi,temporalkv --bits 2 --samples 8",
        "kvq eval --task ruler --compare kivi-2bit,innerq:sign=inside --set sinks=32 --set recent=96 --seqlen 512",
        "kvq eval --task lm_eval:gsm8k --method kivi --model meta-llama/Llama-3.1-8B",
    ),
    "bench": (
        "kvq bench generate --compare kivi,temporalkv --bits 2",
        "kvq bench generate --model smollm2 --compare kivi --bits 2 --context 2048 --batch 1 --prefill compressed",
        "kvq bench kernels --check",
        "kvq bench report",
    ),
    "analyze": ("kvq analyze", "kvq analyze error --samples 4"),
    "inspect": ("kvq inspect artifacts/reference/temporalkv-2bit",),
    "methods": ("kvq methods", "kvq methods kivi"),
    "bits": ("kvq bits --shapes llama-3.1-8b --context 131072", "kvq bits --papers"),
    "plan": (
        "kvq plan --shapes llama-3.1-8b --memory 80GB --context 131072 --batch 8",
        "kvq plan --shapes llama-3.1-8b --gpu rtx4090 --compare fp16,kivi,temporalkv",
    ),
    "results": (
        "kvq results results/reference --format markdown",
        "kvq results results/reference --baseline kivi",
        "kvq results results/reference --runs",
    ),
    "report": (
        "kvq report results/reference",
        "kvq report results/reproduction/smollm2/compare-2bit --out compare.html",
    ),
    "reproduce": ("kvq reproduce", "kvq reproduce table-temporalkv-6"),
}


def epilog(command: str) -> str | None:
    """Text with the examples of a subcommand, for the end of its help; None if it has none."""
    lines = EXAMPLES.get(command, ())
    return "\n\n".join(["Examples:", *lines]) if lines else None
