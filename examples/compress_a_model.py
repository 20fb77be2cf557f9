"""Generate with a compressed key-value cache, by KIVI and by a calibrated artifact, and print what the caches take.

python examples/compress_a_model.py
python examples/compress_a_model.py --model meta-llama/Llama-3.1-8B --artifact artifacts/Llama-3.1-8B/temporalkv-2bit
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvq_cli import attach, load_model

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate with a compressed key-value cache.")
    parser.add_argument("--model", default="reference", help="a Hugging Face id, a folder, or the built-in model")
    parser.add_argument("--artifact", default=HERE.parent / "artifacts/reference/temporalkv-2bit", type=Path)
    parser.add_argument("--prompt", default=HERE / "needle.txt", type=Path)
    parser.add_argument("--tokens", default=12, type=int)
    options = parser.parse_args()

    loaded = load_model(options.model)
    inputs = loaded.tokenizer(options.prompt.read_text(encoding="utf-8").rstrip("\n"), return_tensors="pt")
    inputs = inputs.to(loaded.model.device)
    length = inputs["input_ids"].shape[1]
    for method in ("fp16", "kivi-2bit", options.artifact):
        with attach(loaded.model, method) as kv:
            output = kv.generate(**inputs, max_new_tokens=options.tokens, do_sample=False)
            print(f"\n{kv.method.name}: {loaded.tokenizer.decode(output[0, length:])}")
            print(kv.report())


if __name__ == "__main__":
    main()
